"""What clipping and noise leave of a gradient, layer by layer.

All of it is computed from records without noise. Where they are private it is not: it must not be
published or acted upon.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD

from dpkernels.engine.private import make_private
from dpkernels.engine.sides import Preconditioner, Sides
from dpkernels.precondition.estimate import Batch, Loss, check_summed


@dataclass(frozen=True)
class ClippedGradients:
    """What a step would release of some records, before its noise. Not private if they are.

    means: of each layer the mean clipped gradient, flat, preconditioned if the step is.
    sample_norms: of each layer ``[N]``, of the same gradients before the clip.
    """

    means: dict[str, Tensor]
    sample_norms: dict[str, Tensor]


def clipped_gradients(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    max_norm: float,
    preconditioner: Preconditioner | None = None,
) -> ClippedGradients:
    """Return mean and norms of the samples' gradients, as private training clips them.

    model: in private training or not; it is copied, and evaluated without dropout.
    batches: (inputs, targets), all of which make up one mean.
    loss: a sum over samples, or ``[B]``.
    preconditioner: its present factors are used; it is not told of a step.

    Not private if the records are. Raises ValueError if there are no records, or for a loss that is
    an average.
    """
    model = copy.deepcopy(model).eval()
    optimizer = SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*adds no noise", category=UserWarning)
        training = make_private(
            model,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=max_norm,
            expected_batch_size=1.0,
            loss_reduction="sum",
            preconditioner=_Present(preconditioner) if preconditioner is not None else None,
            keep_norms=True,
        )
    norms: dict[str, list[Tensor]] = {name: [] for name in training.layers}
    records = 0
    for inputs, targets in batches:
        if records == 0:
            check_summed(model, inputs, targets, loss)
        loss(model(*inputs), targets).sum().backward()
        records += targets.shape[0]
        for name, values in training.sample_norms().items():
            norms[name].append(values)
    if records == 0:
        raise ValueError("clipped_gradients: batches must have records, got none")
    optimizer.step()
    means = {
        name: torch.cat([_gradient(p) / records for p in parameters])
        for name, parameters in training.layers.items()
    }
    return ClippedGradients(means, {name: torch.cat(parts) for name, parts in norms.items()})


def signal_to_noise(signals: Mapping[str, Tensor], noise_std: float) -> dict[str, float]:
    """Return |signal| / |noise| of each layer, the latter as expected: noise_std sqrt(elements).

    The paper shows the ratio layer by layer (DP-KFC, Fig. 1) and gives no formula; this one
    compares what a step releases of a layer with the noise on it, both after preconditioning.

    signals: of each layer the mean clipped gradient without noise, of any shape:
        ``ClippedGradients.means``. Over many records it is the expected one; the mean of a small
        batch is longer, by the scatter of its samples. Not private.
    noise_std: of the noise on every element: sigma * sensitivity / expected batch size.
    """
    if noise_std <= 0:
        raise ValueError(f"signal_to_noise: noise_std must be > 0, got {noise_std}")
    return {
        name: float(signal.double().norm()) / (noise_std * signal.numel() ** 0.5)
        for name, signal in signals.items()
    }


def total_norms(sample_norms: Mapping[str, Tensor]) -> Tensor:
    """Return the norm over all layers of each sample's gradient, float64 ``[B]``. Not private.

    sample_norms: ``[B]`` for each layer, as ``PrivateTraining.sample_norms()`` and
        ``ClippedGradients`` have them. Raises ValueError if there are no samples.
    """
    norms = [norms.double() for norms in sample_norms.values()]
    if not norms or not norms[0].numel():
        raise ValueError("total_norms: sample_norms must have samples, got none")
    return torch.stack(norms).square().sum(0).sqrt()


def clipped_fraction(sample_norms: Mapping[str, Tensor], max_norm: float) -> float:
    """Return the part of the samples whose gradient is longer than the bound. Not private.

    A gradient that is not finite counts: the clip leaves nothing of it. sample_norms: as for
    ``total_norms``, which says what raises.
    """
    within = total_norms(sample_norms) <= max_norm
    return 1 - float(within.double().mean())


class _Present:
    """The factors of a preconditioner that is not told of steps, which may refresh it."""

    def __init__(self, preconditioner: Preconditioner) -> None:
        self._preconditioner = preconditioner

    def sides(self, layer: str) -> Sides:
        return self._preconditioner.sides(layer)


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.flatten()
