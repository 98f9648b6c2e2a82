"""One training step in every form: plain SGD, ours, Opacus, ``vmap``.

Every form does what a user's loop does: clear gradients, forward, loss, backward, step; noise
included in the private ones, sampling and accounting left out of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dpkernels
from dpkernels.ops.factor import Factor, Full, LowRank
from dpkernels.precondition import FixedSides, Sides

Step = Callable[[], object]
RATE, CLIP, SIGMA = 0.01, 1.0, 1.0


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """SGD without privacy."""
    optimizer = torch.optim.SGD(_trained(model), RATE)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor, sides: FixedSides | None = None) -> Step:
    """``make_private``, DP-SGD or preconditioned."""
    optimizer = torch.optim.SGD(_trained(model), RATE)
    dpkernels.make_private(
        model,
        optimizer,
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=x.shape[0],
        loss_reduction="mean",
        preconditioner=sides,
    )

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def full_rank(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Symmetric positive matrices on both sides of every linear and convolutional layer."""
    return ours(model, x, y, _factors(model, _full))


def rank_64(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """64 eigenpairs and a tail on both sides of every linear and convolutional layer."""
    return ours(model, x, y, _factors(model, _low_rank))


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Opacus as it comes: per-sample gradients of every layer are stored."""
    from opacus import PrivacyEngine

    optimizer = torch.optim.SGD(_trained(model), RATE)
    private, private_optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=_loader(x, y),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        poisson_sampling=False,
    )

    def step() -> None:
        private_optimizer.zero_grad()
        cross_entropy(private(x), y).backward()
        private_optimizer.step()

    return step


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Opacus' fast gradient clipping: norms by ghost clipping, two backward passes."""
    from opacus import PrivacyEngine

    optimizer = torch.optim.SGD(_trained(model), RATE)
    private, private_optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(reduction="mean"),
        data_loader=_loader(x, y),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )

    def step() -> None:
        private_optimizer.zero_grad()
        criterion(private(x), y).backward()
        private_optimizer.step()

    return step


def per_sample_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """``vmap(grad)``: per-sample gradients, clipped, summed and noised in plain PyTorch."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}

    def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        output = functional_call(model, (parameters, fixed), (sample.unsqueeze(0),))
        return cross_entropy(output, label.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    optimizer = torch.optim.SGD(trained.values(), RATE)

    def step() -> None:
        values = {name: p.detach() for name, p in trained.items()}
        found = gradients(values, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        factors = (CLIP / norms).clamp(max=1.0)
        for name, parameter in trained.items():
            total = torch.tensordot(factors, found[name], 1)
            total.add_(torch.randn_like(total), alpha=SIGMA * CLIP)
            parameter.grad = total / x.shape[0]
        optimizer.step()

    return step


FORMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "plain SGD": plain,
    "DP-SGD": ours,
    "full rank": full_rank,
    "rank 64": rank_64,
    "Opacus hooks": opacus_hooks,
    "Opacus ghost": opacus_ghost,
    "vmap": per_sample_vmap,
}
OURS = ("DP-SGD", "full rank", "rank 64")


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _loader(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), batch_size=x.shape[0])


def _factors(model: nn.Module, make: Callable[[int], Factor]) -> FixedSides:
    """Return factors for the weight and bias of every trained linear and convolutional layer."""
    sides = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.requires_grad:
            rows = module.weight.flatten(1)
            bias = 0 if module.bias is None else 1
            sides[name] = Sides(make(rows.shape[0]), make(rows.shape[1] + bias))
    return FixedSides(sides)


def _full(size: int) -> Full:
    basis, _ = torch.linalg.qr(torch.randn(size, size))
    matrix = (basis * (0.5 + torch.rand(size))) @ basis.T
    return Full(((matrix + matrix.T) / 2).contiguous())


def _low_rank(size: int) -> LowRank:
    rank = min(64, size)
    basis, _ = torch.linalg.qr(torch.randn(size, rank))
    return LowRank(basis.contiguous(), 0.5 + torch.rand(rank), 1.0)


def quietly(make: Callable[[nn.Module, Tensor, Tensor], Step]) -> Callable[..., Step]:
    """Return ``make`` without the warnings about fixed seeds and hooks that others print."""

    def wrapped(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(model, x, y)

    return wrapped
