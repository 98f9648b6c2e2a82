"""Whether a model's private gradient is that of single samples, or is refused with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import dpkernels
from benchmarks.models.case import Case, Inputs

Gradient = list[Tensor]


@dataclass(frozen=True)
class Result:
    """What became of a case.

    message: of the refusal, if there is one. error: the largest difference to single samples,
    relative to the largest gradient. rules: what served the layers.
    """

    case: Case
    message: str = ""
    error: float = 0.0
    rules: tuple[str, ...] = ()

    @property
    def expected(self) -> bool:
        """Whether it ran and is right, or was refused as it is known to be."""
        if self.message:
            return bool(self.case.refused) and self.case.refused in self.message
        return not self.case.refused and self.error <= self.case.tolerance


def check(case: Case, batches: Sequence[int] = (3, 5)) -> Result:
    """Train one model for a step on each of ``batches``, and compare with single samples.

    In float64, without noise, at a bound that clips some samples and leaves others alone.
    """
    torch.manual_seed(0)
    model = case.build().double().train()
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.add_(torch.randn_like(p), alpha=0.02)  # zeros would hide what they multiply
    given = [_double(case.inputs(batch)) for batch in batches]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compared(case, model, trained, given)
    except dpkernels.Unsupported as refusal:
        return Result(case, message=str(refusal))


def _compared(
    case: Case, model: nn.Module, trained: list[nn.Parameter], given: Sequence[Inputs]
) -> Result:
    optimizer = torch.optim.SGD(trained, lr=0.0)
    # Refused or not, before samples are compared: BatchNorm has no gradients of single samples.
    training = _private(model, optimizer, 1.0)
    training.detach()
    wanted = [_sample_gradients(case, model, inputs) for inputs in given]
    bound = float(torch.stack([_norm(g) for g in wanted[0]]).median())
    training = _private(model, optimizer, bound)
    worst = 0.0
    for inputs, gradients in zip(given, wanted, strict=True):
        optimizer.zero_grad()
        case.loss(model(**inputs)).sum().backward()
        optimizer.step()
        clipped = [[x * _factor(bound, g) for x in g] for g in gradients]
        total = [torch.stack(parts).sum(0) for parts in zip(*clipped, strict=True)]
        got = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
        scale = max(float(x.abs().max()) for x in total)
        differences = [float((a - b).abs().max()) for a, b in zip(got, total, strict=True)]
        worst = max(worst, max(differences) / scale)
    rules = sorted({layer.rule for layer in training.report().layers})
    return Result(case, error=worst, rules=tuple(rules))


def _private(
    model: nn.Module, optimizer: torch.optim.Optimizer, bound: float
) -> dpkernels.PrivateTraining:
    return dpkernels.make_private(
        model,
        optimizer,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1.0,
        loss_reduction="sum",
    )


def _sample_gradients(case: Case, model: nn.Module, inputs: Inputs) -> list[Gradient]:
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for i in range(len(next(iter(inputs.values())))):
        loss = case.loss(model(**{key: x[i : i + 1] for key, x in inputs.items()})).sum()
        found = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        gradients.append(list(found))
    return gradients


def _factor(bound: float, gradient: Gradient) -> float:
    norm = float(_norm(gradient))
    return bound / norm if norm > bound else 1.0


def _norm(gradient: Iterable[Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in gradient]).sum().sqrt()


def _double(inputs: Inputs) -> Inputs:
    return {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
