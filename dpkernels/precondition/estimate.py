"""Moments of all layers, by forward and backward passes on probes through the engine's capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

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


class Collected(Protocol):
    """What is estimated of one layer, pass by pass."""

    layer: Layer

    def update(self, captured: Captured) -> None:
        """Add what one pass has captured. Raises ValueError for what is not finite."""
        ...

    def settle(self) -> None:
        """Finish what was put off; called once, after the last pass."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        ...


Moments = TypeVar("Moments", bound=Collected)


def estimate_moments(
    model: nn.Module, batches: Iterable[Batch], loss: Loss, estimation: Estimation
) -> dict[str, LayerMoments]:
    """Return A and G of every trained layer at the present parameters, by the layer's name.

    Arguments as for ``collect``. Layers that take no factors (``why_not``) or that no probe reaches
    have none. One forward and backward pass for each batch, and B T n^2 flops for each side.
    """
    return collect(model, batches, loss, lambda layer: LayerMoments(layer, estimation), why_not)


def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    start: Callable[[Layer], Moments],
    why_not: Callable[[Layer], str | None],
) -> dict[str, Moments]:
    """Return what is collected of every trained layer on some probes, by the layer's name.

    model: in private training or not; nothing of it changes (``dpkernels.engine.probing``).
    batches: probes, moved to the device and, if they are not integers, the dtype of the model's
        first parameter.
    loss: summed over samples, or ``[B]``.
    start: makes what a layer's passes are added to.
    why_not: layers that it gives a reason for stay as they started.

    Raises ValueError for a loss that is an average, and for activations or errors that are not
    finite.
    """
    model, _ = group_of(model, None)
    moments: dict[str, Moments] = {}

    def layer_complete(current: Pass, layer: Layer, captured: Captured) -> None:
        if why_not(layer) is None:
            moments[layer.name].update(captured)

    def pass_complete(current: Pass) -> None:
        for layer, uses in current.uses.items():
            if why_not(layer) is None:
                moments[layer.name].update(layer.merged(uses))

    with probing(model, layer_complete, pass_complete) as layers, undisturbed(model):
        moments |= {layer.name: start(layer) for layer in layers}
        like = next(p for p in model.parameters() if p.is_floating_point())
        for index, (inputs, targets) in enumerate(batches):
            inputs, targets = _beside(like, inputs), _beside(like, targets)
            if index == 0:
                check_summed(model, inputs, targets, loss)
            loss(model(*inputs), targets).sum().backward()
    for one in moments.values():
        one.settle()
    return moments


def started(model: nn.Module, start: Callable[[Layer], Moments]) -> dict[str, Moments]:
    """Return what ``collect`` starts from, without a pass."""
    model, _ = group_of(model, None)
    with probing(model, lambda *_: None, lambda *_: None) as layers:
        return {layer.name: start(layer) for layer in layers}


def _beside(like: Tensor, tensors: Any) -> Any:
    """Return tensors on the device of ``like``, floating-point ones in its dtype."""

    def moved(x: Tensor) -> Tensor:
        return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)

    return tree_map_only(Tensor, moved, tensors)


@torch.no_grad()
def check_summed(model: nn.Module, inputs: Sequence[Tensor], targets: Tensor, loss: Loss) -> None:
    """Raise ValueError if the loss of some samples is not the sum of those of its halves.

    An average of B samples makes errors 1/B of what they are, and G 1/B^2: damping would drown it.
    """
    size = targets.shape[0]
    half = min(size, _CHECKED_SAMPLES) // 2
    if half == 0:
        return

    def loss_of(first: int, last: int) -> float:
        def cut(x: Tensor) -> Tensor:
            return x[first:last] if x.dim() and x.shape[0] == size else x

        part = tree_map_only(Tensor, cut, inputs)
        return float(loss(model(*part), targets[first:last]).sum())

    whole, parts = loss_of(0, 2 * half), loss_of(0, half) + loss_of(half, 2 * half)
    if abs(whole - parts / 2) < abs(whole - parts):
        raise ValueError(
            f"loss: it must be summed over samples, or one number for each; got {whole:g} for "
            f"{2 * half} samples whose halves add up to {parts:g}, so it is an average; use "
            "reduction='sum' or 'none'"
        )
