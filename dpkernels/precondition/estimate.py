"""Factors of all layers, by forward and backward passes on probes through the engine's capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpkernels.engine.capture import Captured, Pass
from dpkernels.engine.distributed import group_of
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.probing import probing, undisturbed
from dpkernels.precondition.moments import Estimation, LayerMoments, why_not

# What the model returned and the targets, to a sum over samples or one loss for each.
Loss = Callable[[Any, Tensor], Tensor]
Batch = tuple[tuple[Tensor, ...], Tensor]

# Enough samples to tell a sum from a mean, and cheap beside a batch.
_CHECKED_SAMPLES = 8


def estimate_moments(
    model: nn.Module, batches: Iterable[Batch], loss: Loss, estimation: Estimation
) -> dict[str, LayerMoments]:
    """Return A and G of every trained layer at the present parameters, by the layer's name.

    model: in private training or not; nothing of it changes (``dpkernels.engine.probing``).
    batches: probes, moved to the device and, if they are not integers, the dtype of the model's
        first parameter.
    loss: summed over samples, or ``[B]``.

    Layers that take no factors (``why_not``) or that no probe reaches have none. One forward and
    backward pass for each batch, and B T n^2 flops for each side. Raises ValueError for a loss that
    is an average, and for activations or errors that are not finite.
    """
    model, _ = group_of(model, None)
    moments: dict[str, LayerMoments] = {}

    def layer_complete(current: Pass, layer: Layer, captured: Captured) -> None:
        if why_not(layer) is None:
            moments[layer.name].update(captured)

    def pass_complete(current: Pass) -> None:
        for layer, uses in current.uses.items():
            if why_not(layer) is None:
                moments[layer.name].update(layer.merged(uses))

    with probing(model, layer_complete, pass_complete) as layers, undisturbed(model):
        moments |= {layer.name: LayerMoments(layer, estimation) for layer in layers}
        like = next(p for p in model.parameters() if p.is_floating_point())
        for index, (inputs, targets) in enumerate(batches):
            inputs, targets = _beside(like, inputs), _beside(like, targets)
            if index == 0:
                _check_summed(model, inputs, targets, loss)
            loss(model(*inputs), targets).sum().backward()
    for one in moments.values():
        one.settle()
    return moments


def no_moments(model: nn.Module, estimation: Estimation) -> dict[str, LayerMoments]:
    """Return what ``estimate_moments`` starts from: every trained layer, without moments."""
    model, _ = group_of(model, None)
    with probing(model, lambda *_: None, lambda *_: None) as layers:
        return {layer.name: LayerMoments(layer, estimation) for layer in layers}


def _beside(like: Tensor, tensors: Any) -> Any:
    """Return tensors on the device of ``like``, floating-point ones in its dtype."""

    def moved(x: Tensor) -> Tensor:
        return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)

    return tree_map_only(Tensor, moved, tensors)


@torch.no_grad()
def _check_summed(
    model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, loss: Loss
) -> None:
    """Raise ValueError if the loss of some samples is not the sum of those of its halves.

    An average of B samples makes errors 1/B of what they are, and G 1/B^2: damping would drown it.
    """
    size = targets.shape[0]
    half = min(size, _CHECKED_SAMPLES) // 2
    if half == 0:
        return

    def loss_of(first: int, last: int) -> float:
        part = [x[first:last] if x.dim() and x.shape[0] == size else x for x in inputs]
        return float(loss(model(*part), targets[first:last]).sum())

    whole, parts = loss_of(0, 2 * half), loss_of(0, half) + loss_of(half, 2 * half)
    if abs(whole - parts / 2) < abs(whole - parts):
        raise ValueError(
            f"loss: it must be summed over samples, or one number for each; got {whole:g} for "
            f"{2 * half} samples whose halves add up to {parts:g}, so it is an average; use "
            "reduction='sum' or 'none'"
        )
