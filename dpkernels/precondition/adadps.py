"""Scale-then-privatise by second moments of gradients, in a form with two diagonals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from dpkernels.engine.capture import flattened
from dpkernels.engine.layers.conv import ConvLayer
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.linear import LinearLayer
from dpkernels.engine.rules import layers_of
from dpkernels.engine.sides import IDENTITY, Sides
from dpkernels.ops.checks import check_finite
from dpkernels.ops.factor import Diagonal
from dpkernels.precondition.probes import Probe


class FactoredAdaDPS:
    """AdaDPS (Li et al. 2022) with second moments that are products of rows and columns.

    AdaDPS divides every element of a gradient by sqrt(v) + eps before it is clipped, v being the
    second moment of gradients of public batches. That is no Kronecker product. This is not AdaDPS,
    but the nearest that two diagonals can do: v of a weight ``[O, I]`` (``[O, I + 1]`` with its
    bias) is replaced by r c^T / mean(v), of its row means r and column means c, as Adafactor does
    (Shazeer and Stern 2018), which is exact where v has rank one.

        left_i right_j = 1 / (sqrt(r_i / s) + sqrt(eps)) / (sqrt(c_j / s) + sqrt(eps)),
        s = sqrt(mean(v))

    model: its linear layers and convolutions without groups are scaled; the others are left as they
        are (``report``). It is copied for every refresh, and never changed.
    probe, loss: batches, and ``loss(outputs, targets)``: the samples' losses, or their sum.
    batches: how many mean gradients v is the second moment of.
    batch_size: how many samples each of them is the mean of.
    eps: added to the root of v.
    refresh_every: in steps; None: estimated once.
    seed: of the probe's generator.

    The model is in evaluation mode while it is probed: dropout has no generator of its own. Cost of
    a refresh: ``batches`` forward and backward passes of ``batch_size`` samples.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        batches: int = 8,
        batch_size: int = 256,
        eps: float = 1e-4,
        refresh_every: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("batches", batches), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"FactoredAdaDPS: {name} must be at least 1, got {value}")
        if refresh_every is not None and refresh_every < 1:
            raise ValueError(
                f"FactoredAdaDPS: refresh_every must be at least 1, or None, got {refresh_every}"
            )
        check_finite("FactoredAdaDPS", "eps", eps, above=0.0)
        self._model, self._probe, self._loss = model, probe, loss
        self._batches, self._batch_size, self._eps = batches, batch_size, eps
        self._refresh_every, self._steps = refresh_every, 0
        # Beside the CPU, so that probes do not depend on the device.
        self._generator = Generator().manual_seed(seed)
        self._sides: dict[str, Sides] = {}
        self._left_out: dict[str, str] = {}
        self.refresh()

    @property
    def not_private(self) -> str | None:
        """Why there is no guarantee, if the probe is private data."""
        return self._probe.not_private

    def sides(self, layer: str) -> Sides:
        """Return the two diagonals of a layer, or the identity."""
        return self._sides.get(layer, IDENTITY)

    def report(self) -> str:
        """Return what is scaled by what, and what is left as it is, and why."""
        lines = [f"second moments from {self._probe.describe()}"]
        lines += [f"{name}: {sides.describe()}" for name, sides in self._sides.items()]
        lines += [f"{name}: none, {reason}" for name, reason in self._left_out.items()]
        return "\n".join(lines)

    def after_step(self) -> None:
        """Count a step; estimate anew when it is time."""
        self._steps += 1
        if self._refresh_every is not None and self._steps % self._refresh_every == 0:
            self.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the diagonals, and where probes and schedule are."""
        diagonals = {
            name: [factor.values for factor in (sides.left, sides.right)]  # type: ignore[union-attr]
            for name, sides in self._sides.items()
        }
        generator = self._generator.get_state()
        return {"steps": self._steps, "generator": generator, "diagonals": diagonals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint with the diagonals that it was made with."""
        if state["diagonals"].keys() != self._sides.keys():
            raise ValueError(
                f"FactoredAdaDPS.load_state_dict: state must be of the layers {list(self._sides)}, "
                f"got {list(state['diagonals'])}; load it for the model that it was saved with"
            )
        for name, values in state["diagonals"].items():
            self._sides[name] = Sides(*(Diagonal(value.clone()) for value in values))
        self._steps = state["steps"]
        self._generator.set_state(state["generator"])

    def refresh(self) -> None:
        """Estimate second moments at the model's present parameters."""
        model = copy.deepcopy(self._model).eval()
        layers, self._left_out = _scalable(model)
        parameters = [p for layer in layers for p in layer.parameters.values()]
        self._sides = {}
        if not layers:
            return
        moments = [torch.zeros_like(p) for p in parameters]
        for _ in range(self._batches):
            inputs, targets = self._probe.batch(self._batch_size, self._generator)
            inputs, targets = _beside(inputs, parameters[0]), targets.to(parameters[0].device)
            loss = self._loss(model(*inputs), targets).sum() / self._batch_size
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            torch._foreach_addcmul_(moments, gradients, gradients, 1 / self._batches)
        # Weight and bias of a layer are neighbours in both lists.
        left = iter(moments)
        for layer in layers:
            parts = [next(left).view(p.shape[0], -1) for p in layer.parameters.values()]
            self._sides[layer.name] = factored(torch.cat(parts, 1), self._eps)


def _beside(inputs: Sequence[Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """Return tensors on the device of ``like``, floating-point ones in its dtype."""
    return tuple(
        x.to(like.device, like.dtype if x.is_floating_point() else x.dtype) for x in inputs
    )


def factored(moment: Tensor, eps: float) -> Sides:
    """Return two diagonals whose product is about ``1 / (sqrt(moment) + eps)``, ``[O, I]``."""
    scale = moment.mean().sqrt().clamp_min(torch.finfo(moment.dtype).tiny)
    left, right = (1 / ((moment.mean(axis) / scale).sqrt() + eps**0.5) for axis in (1, 0))
    return Sides(Diagonal(left), Diagonal(right))


def _scalable(model: nn.Module) -> tuple[list[Layer], dict[str, str]]:
    """Return layers whose gradient is one matrix, and why the others are not among them."""
    scaled: list[Layer] = []
    left_out: dict[str, str] = {}
    layers = flattened(layers_of(model))
    owners: dict[int, int] = {}
    for p in (p for layer in layers for p in layer.parameters.values()):
        owners[id(p)] = owners.get(id(p), 0) + 1
    for layer in layers:
        if any(owners[id(p)] > 1 for p in layer.parameters.values()):
            left_out[layer.name] = "it shares a parameter with another layer"
        elif not isinstance(layer, LinearLayer | ConvLayer) or not layer.trains("weight"):
            left_out[layer.name] = f"it has no trained weight with two sides ({layer.rule})"
        elif isinstance(layer, ConvLayer) and layer.module.groups > 1:
            left_out[layer.name] = "a convolution with groups takes no preconditioner"
        else:
            scaled.append(layer)
    return scaled, left_out
