"""The truth about private gradients: a loop over single samples with plain autograd."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

import dpkernels
from dpkernels.engine import Clipping
from dpkernels.ops.ghost.rounding import norm_limit
from dpkernels.precondition import FixedSides, Sides
from python_tests.tolerance import assert_as_accurate

# How a gradient by parameter name becomes the one that is clipped.
Transform = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def sample_losses(model: nn.Module, inputs: Sequence[Tensor], autocast: bool = False) -> Tensor:
    """Return ``[B]``, each sample's own loss, float32 or wider; the model may run in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(*inputs).flatten(1)
    outputs = outputs.float() if autocast else outputs
    return (outputs - 1).square().sum(1)


def sample_gradients(
    model: nn.Module, inputs: Sequence[Tensor], autocast: bool = False
) -> list[dict[str, Tensor]]:
    """Return each sample's gradient by parameter name, from a pass of that sample alone."""
    names, parameters = zip(
        *((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True
    )
    gradients = []
    for i in range(inputs[0].shape[0]):
        loss = sample_losses(model, [x[i : i + 1] for x in inputs], autocast).sum()
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        gradients.append(dict(zip(names, found, strict=True)))
    return gradients


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return sum(g.double().square().sum() for g in gradient.values()).sqrt().item()


def clipping_bound(gradients: Sequence[Mapping[str, Tensor]]) -> float:
    """Return a bound that clips some of the gradients, and one of one."""
    norms = sorted(map(_norm, gradients))
    return 0.75 * norms[len(norms) // 2]


def clipped_sum(gradients: Sequence[Mapping[str, Tensor]], bound: float) -> Tensor:
    """Return the sum of the clipped gradients, all parameters in one vector."""
    total: Tensor | None = None
    for gradient in gradients:
        norm = _norm(gradient)
        flat = torch.cat([g.flatten() for g in gradient.values()])
        flat = flat * min(1.0, bound / norm) if norm else flat
        total = flat if total is None else total + flat
    assert total is not None
    return total


def make_private(
    model: nn.Module,
    bound: float | Clipping = 1.0,
    *,
    reduction: str = "sum",
    sides: Mapping[str, Sides] | None = None,
) -> dpkernels.PrivateTraining:
    """Put the model into private training, without noise and with steps of no length."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that without noise it is not private
        return dpkernels.make_private(
            model,
            torch.optim.SGD(parameters, lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            expected_batch_size=1.0,
            loss_reduction=reduction,
            preconditioner=FixedSides(sides or {}),
        )


def private_sum(
    model: nn.Module,
    inputs: Sequence[Tensor],
    bound: float,
    *,
    reduction: str = "sum",
    sides: Mapping[str, Sides] | None = None,
    autocast: bool = False,
) -> Tensor:
    """Return the clipped sum from the engine, all parameters in one vector."""
    training = make_private(model, bound, reduction=reduction, sides=sides)
    losses = sample_losses(model, inputs, autocast)
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    training.optimizer.step()
    training.detach()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def assert_private_sum(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    reduction: str = "sum",
    sides: Mapping[str, Sides] | None = None,
    transform: Transform = lambda gradient: gradient,
    poison: bool = False,
) -> None:
    """Assert that the engine's clipped sum is that of the loop, in float64, but for rounding.

    poison: the engine gets one more sample, which is NaN throughout.

    How far rounding reaches is measured: the same loop in float32 is off by some multiple of its
    eps. Both float64 sums may be off by that multiple of theirs, and by twice as much where they
    add up in another order: 4 in all. Norms may be high by what ``ops.ghost`` states.
    """
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    narrow = [x.float() if x.is_floating_point() else x for x in inputs]
    model = model.double()
    gradients = [transform(g) for g in sample_gradients(model, wide)]
    bound = clipping_bound(gradients)
    exact = clipped_sum(gradients, bound)
    plain_model = copy.deepcopy(model).float()
    plain = [
        transform({name: x.double() for name, x in g.items()})
        for g in sample_gradients(plain_model, narrow)
    ]
    reach = (clipped_sum(plain, bound) - exact).abs().max() / torch.finfo(torch.float32).eps
    assert exact.abs().max() > 0 and reach > 0
    if poison:
        wide = [torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in wide]
    actual = private_sum(model, wide, bound, reduction=reduction, sides=sides)
    error = (actual - exact).abs().max()
    allowed = 4 * torch.finfo(torch.float64).eps * (reach + exact.abs().max())
    allowed += norm_limit(torch.float64, 1) * exact.abs().max()
    assert error <= allowed, f"differ by {error:.3g}, rounding explains {allowed:.3g}"


def assert_accurate_under_autocast(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Assert that the sum of a model in bfloat16, not clipped, is as good as that of the loop."""
    exact = sample_gradients(copy.deepcopy(model).double(), [x.double() for x in inputs])
    unbounded = 2.0 * sum(map(_norm, exact))
    inputs = [x.float() for x in inputs]
    plain = clipped_sum(sample_gradients(model.float(), inputs, autocast=True), unbounded)
    actual = private_sum(model, inputs, unbounded, autocast=True)
    assert_as_accurate(actual, plain, clipped_sum(exact, unbounded))
