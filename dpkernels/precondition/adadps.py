"""AdaDPS (Li et al. 2022): every element of a gradient is scaled, then clipped, from probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpkernels.engine.capture import Captured
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.scaled import gradients_of
from dpkernels.engine.sides import Scale, Sides
from dpkernels.ops.checks import check_finite
from dpkernels.ops.kron import SecondMoment
from dpkernels.precondition.estimate import Loss
from dpkernels.precondition.probes import Probe
from dpkernels.precondition.refreshed import Refreshed


class LayerSquares:
    """Running E[g^2] of a layer: one number for each weight, over gradients of single samples."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._means = {name: SecondMoment() for name in layer.parameters}

    @property
    def means(self) -> dict[str, Tensor]:
        """E[g^2] of each trained parameter, in its shape; empty if no probe reached the layer."""
        return {name: x.value for name, x in self._means.items() if x.count}

    def update(self, captured: Captured) -> None:
        """Add what one pass has captured. Raises ValueError for squares that are not finite."""
        batch = captured[0].shape[0]
        if batch == 0:
            return
        squares = gradients_of(self.layer, captured).square_sums()
        for mean, total in zip(self._means.values(), squares, strict=True):
            mean.update(total / batch, batch)

    def settle(self) -> None:
        """Do nothing: every pass is added at once."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; tensors are not copied."""
        return {name: x.state_dict() for name, x in self._means.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; tensors are copied, to the layer's device.

        Raises ValueError for other parameters, or other shapes.
        """
        wanted = {name: tuple(p.shape) for name, p in self.layer.parameters.items()}
        found = {name: x["mean"] for name, x in state.items()}
        sizes = {
            name: wanted.get(name) if x is None else tuple(x.shape) for name, x in found.items()
        }
        if sizes != wanted:
            raise ValueError(
                f"AdaDPS.load_state_dict: state of {self.layer.describe()} must be of {wanted}, "
                f"got {sizes}; load it for the model that it was saved with"
            )
        for name, running in self._means.items():
            mean, device = found[name], self.layer.parameters[name].device
            running.load_state_dict(
                state[name] | {"mean": None if mean is None else mean.to(device)}
            )


class AdaDPS(Refreshed[LayerSquares]):
    """Gradients times ``1 / (sqrt(E[g^2]) + damping)``, element by element, before the clip.

    E[g^2] is the second moment of single samples' gradients on probes, at the present parameters:
    one number for each weight. It does not depend on ``batch_size`` but for chance. (The authors'
    is that of gradients averaged over public batches, and moves from step to step; here the
    schedule is that of ``Kfac``.) The noise is not scaled, nor is it scaled back: the optimizer
    gets the noisy sum of what was clipped.

    model, probe, loss, batches, batch_size, refresh_every, seed: as for ``Kfac``. Private probes
        have a ``not_private``, and a run has no epsilon then, nor after a checkpoint.
    damping: epsilon in the paper. Weights with gradients far below it are all scaled alike; the
        larger it is, the closer to no scale. The default was first chosen on 4,000 test
        images of MNIST, among 1e-4 to 0.1; on held-out training images 1e-3, 1e-2 and 0.1 are
        within the noise of a seed (``dpkernels repro dp-kfc --table search``).

    All layers with a rule are scaled: products, convolutions, with groups too, embeddings,
    normalisation and bare parameters; but not those that share a weight, nor what no probe reaches,
    which ``report()`` names. Only one number per weight is held, but layers with positions need
    gradients of single samples, some at a time (``dpkernels.engine.layers.scaled``).

    Scales are first estimated when they are first asked for. Passes are in evaluation mode and
    leave the model, its gradients, torch's generators and whatever training has collected as they
    are. Raises ValueError for wrong arguments, Unsupported for a model that ``make_private``
    refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        loss: Loss,
        *,
        batches: int = 8,
        batch_size: int = 256,
        damping: float = 1e-2,
        refresh_every: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            probe,
            loss,
            batches=batches,
            batch_size=batch_size,
            refresh_every=refresh_every,
            seed=seed,
        )
        check_finite("AdaDPS", "damping", damping, above=0.0)
        self.damping = damping

    def report(self) -> AdaDPSReport:
        """Return which layers are scaled, by what, and why others are not."""
        self._ensure()
        return AdaDPSReport(
            tuple(self._described(name, x) for name, x in self._moments.items()),
            self._probes(),
            self.damping,
            self.refreshes,
            1e3 * self._seconds,
            self.not_private,
        )

    def _estimation(self) -> dict[str, Any]:
        return super()._estimation() | {"damping": self.damping}

    def _start(self, layer: Layer) -> LayerSquares:
        return LayerSquares(layer)

    def _why_not(self, layer: Layer) -> str | None:
        return "its weight is shared with another layer" if layer.shared else None

    def _sides_of(self, moments: Mapping[str, LayerSquares]) -> dict[str, Sides]:
        found = {}
        for name, squares in moments.items():
            if means := squares.means:
                values = {key: 1 / (x.sqrt() + self.damping) for key, x in means.items()}
                found[name] = Sides(scale=Scale(values))
        return found

    def _described(self, name: str, squares: LayerSquares) -> LayerScale:
        layer = squares.layer
        module, means = type(layer.module).__name__, list(squares.means.values())
        if not means:
            return LayerScale(name, module, 0, why=self._why_not(layer) or "no probe reached it")
        elements = sum(x.numel() for x in means)
        mean = sum(float(x.double().sum()) for x in means) / elements
        damped = sum(int((x < self.damping**2).sum()) for x in means) / elements
        return LayerScale(name, module, elements, mean**0.5, damped)


@dataclass(frozen=True)
class LayerScale:
    """One layer.

    elements: how many of its weights have a scale; 0 if none has.
    root: of the mean of E[g^2] over them, to be compared with the damping.
    damped: the part of them whose own root is below the damping.
    why: the layer has no scale; empty if it has.
    """

    name: str
    module: str
    elements: int
    root: float | None = None
    damped: float | None = None
    why: str = ""

    def __str__(self) -> str:
        head = f"{self.name or '(the model itself)'} ({self.module}): "
        if self.root is None:
            return f"{head}none, {self.why}"
        return (
            f"{head}{self.elements} elements, root of mean E[g^2] {self.root:.2e}, "
            f"{self.damped:.0%} of them below the damping"
        )


@dataclass(frozen=True)
class AdaDPSReport:
    """All layers, and what their scales were estimated from; milliseconds: of the last refresh."""

    layers: tuple[LayerScale, ...]
    probes: str
    damping: float
    refreshes: int
    milliseconds: float
    not_private: str | None = None

    @property
    def unpreconditioned(self) -> tuple[str, ...]:
        """Names of the layers whose gradients are clipped as they are."""
        return tuple(layer.name for layer in self.layers if not layer.elements)

    def __str__(self) -> str:
        head = (
            f"AdaDPS from {self.probes}, damping {self.damping:g}, refreshed {self.refreshes} times"
        )
        if self.milliseconds:  # not since a checkpoint
            head += f", the last in {self.milliseconds:.0f} ms"
        if self.not_private is not None:
            head += f"; not private: {self.not_private}"
        return "\n".join([head, *map(str, self.layers)])
