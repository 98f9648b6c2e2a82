"""Which layers cannot tell samples apart at their own input, and what serves them instead.

Found out when the model is called with arguments of a new form, before anything is delivered:

``[B, ...]``          the layer's own rule.
``[B * W, ...]``      windows: each sample has W rows next to each other (OPT, Swin). Linear layers,
                      LayerNorm and embeddings take them apart again. Errors of one sample must be
                      zero in the rows of all others.
``[T]``, ``[1, T]``   an embedding's own rule looks up positions once for each sample, if the model
                      gives the same with that.
anything else         a module around the layer serves it: ``layers.lifted``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from dpkernels.engine.layers.bare import BareLayer
from dpkernels.engine.layers.broadcast import agree
from dpkernels.engine.layers.embedding import EmbeddingBagLayer, EmbeddingLayer
from dpkernels.engine.layers.layer import Layer, Unsupported
from dpkernels.engine.layers.lifted import Lift
from dpkernels.engine.layers.linear import AffineLayer
from dpkernels.engine.layers.scale_shift import ScaleShiftLayer
from dpkernels.engine.layers.scaled_embedding import (
    LookUps,
    WrappedEmbeddingLayer,
    for_each_sample,
)
from dpkernels.engine.layouts import Call, FollowedBy, Seen, Within, look, resized, windows
from dpkernels.engine.sharding import fsdp_modules

# Of one call of a layer: errors of its output when one sample's outputs are differentiated, and
# when the other's are; None if the outputs do not depend on it.
Errors = tuple[Tensor | None, Tensor | None]
# Of an output that is not a tensor: there may be some.
_UNKNOWN = torch.empty(0)


class Lifting:
    """Looks at a model and says which layers a module around them has to serve.

    model: the whole. layers: those whose forward passes are followed, sublayers not apart.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._model, self._layers = model, list(layers)
        self._names = {module: name for name, module in model.named_modules()}
        self._by_module = {layer.module: layer for layer in layers}

    def find(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: int,
        followed_by: FollowedBy,
    ) -> list[Lift]:
        """Return what must be lifted, and mark the layers that are given windows.

        forward: the model's own, in which no layer delivers. followed_by: as ``look`` takes it.
        Raises Unsupported for a layer that
        nothing can serve. A model that cannot run on one of the samples is left as it is.
        """
        small = [resized(args, kwargs, batch, samples) for samples in (1, 2)]
        parameters = [p for layer in self._layers for p in _parameters(layer)]
        with self._undisturbed():
            try:
                # The same random numbers in every run: outputs are compared.
                with torch.no_grad(), torch.random.fork_rng():
                    one = look(self._model, forward, *small[0], parameters, followed_by)
                with torch.no_grad(), torch.random.fork_rng():
                    two = look(self._model, forward, *small[1], parameters, followed_by)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                # Whatever it has against fewer samples, it is looked at again in the backward pass.
                return []
            found = _Look(self, one, two)
            odd = [layer for layer in self._layers if not found.is_plain(layer)]
            if not odd:
                return []
            with torch.random.fork_rng():
                found.errors = self._errors(forward, small[1], odd)
            shared = [layer for layer in odd if found.has_positions(layer)]
            looked_up = self._same_with_positions(forward, small[1], two, shared)
        for layer in looked_up:
            if isinstance(layer, WrappedEmbeddingLayer):
                layer.positions = True
        around: dict[nn.Module, list[Layer]] = {}
        for layer in odd:
            if layer in looked_up or not found.matters(layer):
                continue
            if found.has_windows(layer):
                layer.windows = True
            elif (module := found.around(layer)) is not None:
                around.setdefault(module, []).append(layer)
        return [Lift(self._names[module], module, inside) for module, inside in around.items()]

    def owners(self, parameter: nn.Parameter) -> list[nn.Module]:
        """Return the modules whose forward passes may use the parameter."""
        return [
            layer.module
            for layer in self._layers
            if any(
                parameter is own
                for own in (layer.module.parameters() if layer.sublayers else _parameters(layer))
            )
        ]

    def may_repeat(self, module: nn.Module) -> bool:
        """Return whether a module can run once more as a whole."""
        layer = self._by_module.get(module)
        if layer is not None and not isinstance(layer, BareLayer):
            return False
        return module is self._model or not fsdp_modules(module)

    def described(self, module: nn.Module) -> str:
        """Return name and type for a message."""
        return f"{self._names[module] or 'the model itself'} ({type(module).__name__})"

    def _errors(
        self, forward: Callable[..., Any], small: tuple[Any, Any], layers: Sequence[Layer]
    ) -> dict[nn.Module, list[Errors]]:
        """Return errors of every call of the layers, in a run of two samples."""
        outputs: list[tuple[nn.Module, Any]] = []
        repeating = False

        def keep(module: nn.Module, _: Any, output: Any) -> Any:
            if isinstance(output, Tensor) and output.requires_grad:
                # A view that is changed in place afterwards would lose its place in the graph.
                output = output.clone()
            if not repeating:
                outputs.append((module, output))
            return output

        handles = [layer.module.register_forward_hook(keep) for layer in layers]
        try:
            with torch.enable_grad():
                results = tree_leaves(forward(*small[0], **small[1]))
                repeating = True  # what checkpoints left out, in the backward pass
                followed = [y for _, y in outputs if isinstance(y, Tensor) and y.requires_grad]
                by_sample = [iter(_gradients(results, i, followed)) for i in range(2)]
        finally:
            for handle in handles:
                handle.remove()
        errors: dict[nn.Module, list[Errors]] = {layer.module: [] for layer in layers}
        for module, y in outputs:
            if not isinstance(y, Tensor):
                errors[module].append((_UNKNOWN, _UNKNOWN))
                continue
            first, second = (next(one) if y.requires_grad else None for one in by_sample)
            errors[module].append((first, second))
        return errors

    def _same_with_positions(
        self,
        forward: Callable[..., Any],
        small: tuple[Any, Any],
        plain: Seen,
        layers: Sequence[Layer],
    ) -> list[Layer]:
        """Return the embeddings that may look up positions for each sample: the output stays."""

        def look_up(indices: Tensor, weight: Tensor) -> Tensor:
            return functional.embedding(for_each_sample(indices, 2), weight)

        def stays(chosen: Sequence[Layer]) -> bool:
            weights = [layer.module.weight for layer in chosen]
            try:
                with torch.no_grad(), torch.random.fork_rng(), LookUps(weights, look_up):
                    found = tree_leaves(forward(*small[0], **small[1]))
            except Exception:
                return False
            return agree([y for y in found if isinstance(y, Tensor)], plain.output)

        if stays(layers):
            return list(layers)
        return [layer for layer in layers if len(layers) > 1 and stays([layer])]

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Leave buffers and random numbers as they were."""
        kept = [
            (module._buffers, name, buffer, buffer._version, buffer.clone())
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        gpus = {p.device for p in self._model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(list(gpus)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                for buffers, name, buffer, version, value in kept:
                    if buffer._version != version:
                        with torch.no_grad():
                            buffer.copy_(value)
                    buffers[name] = buffer


class _Look:
    """Runs of one sample and of two, side by side."""

    def __init__(self, lifting: Lifting, one: Seen, two: Seen) -> None:
        self._lifting, self._one, self._two = lifting, one, two
        self.errors: dict[nn.Module, list[Errors]] = {}

    def is_plain(self, layer: Layer) -> bool:
        """Return whether the layer has samples first in every call, and is used by calls alone."""
        if layer.lifted or layer.windows:
            return True
        if self._strays(layer):
            return False
        return bool(layer.sublayers) or all(rows == 1 for rows in self._rows(layer))

    def matters(self, layer: Layer) -> bool:
        """Return whether the model's outputs depend on a call that is not plain."""
        return bool(self._strays(layer)) or bool(self._odd_calls(layer))

    def has_windows(self, layer: Layer) -> bool:
        """Return whether every sample has rows of its own, next to each other, in every call."""
        if self._two.ragged or self._strays(layer) or not _takes_windows(layer):
            return False
        errors, rows = self.errors.get(layer.module, []), self._rows(layer)
        return len(errors) == len(rows) and all(
            _apart(own, both)
            for own, both in zip(rows, errors, strict=True)
            if any(x is not None for x in both)
        )

    def has_positions(self, layer: Layer) -> bool:
        """Return whether an embedding is given what it may look up for each sample."""
        if not isinstance(layer, EmbeddingLayer) or isinstance(layer, EmbeddingBagLayer):
            return False
        # Of the same shape for one sample and for two: no axis of it holds samples.
        one, two = (run.looked_up.get(layer.module, []) for run in (self._one, self._two))
        return (
            not self._strays(layer)
            and one == two
            and all(len(shape) == 1 or shape[:1] == (1,) for shape in one)
        )

    def around(self, layer: Layer) -> nn.Module | None:
        """Return the nearest module that is given samples and returns samples alone.

        None if the layer's own rule suffices: only some of its outputs lack samples.
        Raises Unsupported where there is none for another layer.
        """
        if layer.shared:
            raise Unsupported(
                f"{layer.describe()}: it shares a parameter with another layer and is used without "
                "an axis of samples, or outside of its own forward pass, which no rule covers; "
                "give it a parameter of its own, or freeze it with requires_grad_(False)"
            )
        if layer.sublayers:
            raise Unsupported(
                f"{layer.describe()}: a parameter of it is used outside of its own forward pass, "
                "which its rule does not cover; give the other use a parameter of its own, or "
                "freeze it with requires_grad_(False)"
            )
        calls = [call for pair in self._pairs(layer.module) for call in pair if call is not None]
        stacks = [*(call.within[:-1] for call in calls), *self._strays(layer)]
        common = [module for module in stacks[0] if all(module in stack for stack in stacks)]
        reasons = []
        for module in reversed(common):
            if module is layer.module or not self._lifting.may_repeat(module):
                continue
            reason = self._obstacle(module)
            if reason is None:
                return module
            reasons.append(f"{self._lifting.described(module)} {reason}")
        if isinstance(layer, BareLayer) and all(map(_is_given_samples, calls[::2], calls[1::2])):
            return None
        raise Unsupported(
            f"{layer.describe()}: its input has no axis of samples, and no module around it can "
            f"tell samples apart: {'; '.join(reasons) or 'there is none'}; freeze it with "
            "requires_grad_(False)"
        )

    def _obstacle(self, module: nn.Module) -> str | None:
        """Return why a module cannot be repeated for each sample, if so."""
        for one, two in self._pairs(module):
            if one is None or two is None:
                return "is called another number of times for two samples than for one"
            if two.opaque is not None:
                return (
                    f"returns a {two.opaque}, inside of which tensors cannot be followed (for a "
                    "cache, pass use_cache=False)"
                )
            if not _is_given_samples(one, two):
                return "is given no tensor with samples as its first axis, or windows of them"
            if not two.outputs or {1} != set(map(windows, one.outputs, two.outputs)):
                return "returns a tensor without samples as its first axis"
        return None

    def _strays(self, layer: Layer) -> list[Within]:
        """Return the uses of parameters outside of the forward passes that they belong to."""
        return [
            within
            for parameter in _parameters(layer)
            for within in self._one.uses.get(parameter, [])
            if not any(owner in within for owner in self._lifting.owners(parameter))
        ]

    def _odd_calls(self, layer: Layer) -> list[int]:
        rows, errors = self._rows(layer), self.errors.get(layer.module, [])
        return [
            k
            for k, own in enumerate(rows)
            if own != 1 and (len(errors) != len(rows) or any(x is not None for x in errors[k]))
        ]

    def _pairs(self, module: nn.Module) -> list[tuple[Call | None, Call | None]]:
        """Return calls for one sample and for two; None beside a call that the other run lacks."""
        one, two = self._one.calls.get(module, []), self._two.calls.get(module, [])
        if len(one) != len(two):
            return [(None, call) for call in two] or [(call, None) for call in one]
        return list(zip(one, two, strict=True))

    def _rows(self, layer: Layer) -> list[int]:
        """Return, for every call, how many rows of the layer's input a sample has; 0: none."""
        if isinstance(layer, EmbeddingLayer):
            one, two = (run.looked_up.get(layer.module, []) for run in (self._one, self._two))
            if len(one) == len(two):
                return list(map(windows, one, two))
        return [_rows(layer, *pair) for pair in self._pairs(layer.module)]


def _rows(layer: Layer, one: Call | None, two: Call | None) -> int:
    if one is None or two is None or len(one.inputs) != len(two.inputs) or not one.inputs:
        return 0
    if not isinstance(layer, BareLayer):
        return windows(one.inputs[0], two.inputs[0])
    return int(_is_given_samples(one, two) and all(map(_is_one, one.outputs, two.outputs)))


def _is_given_samples(one: Call, two: Call) -> bool:
    """Return whether inputs have samples first, or do not depend on how many there are."""
    found = set(map(windows, one.inputs, two.inputs))
    return 1 in found and found <= {0, 1}


def _is_one(one: torch.Size, two: torch.Size) -> bool:
    return windows(one, two) == 1


def _parameters(layer: Layer) -> list[nn.Parameter]:
    return [p for part in layer.sublayers or (layer,) for p in part.parameters.values()]


def _takes_windows(layer: Layer) -> bool:
    if isinstance(layer, ScaleShiftLayer):
        return layer.channel_axis == -1
    return isinstance(layer, AffineLayer | EmbeddingLayer) and not isinstance(
        layer, EmbeddingBagLayer
    )


def _apart(rows: int, errors: Errors) -> bool:
    """Return whether errors of each of two samples are in its own rows, and in no others."""
    if rows == 0 or any(x is None or x.shape[0] != 2 * rows for x in errors):
        return False
    first, second = (x for x in errors if x is not None)
    mine = first[:rows].any() and second[rows:].any()
    return bool(mine) and not bool(first[rows:].any() or second[:rows].any())


def _gradients(results: Sequence[Any], sample: int, inputs: Sequence[Tensor]) -> Sequence[Any]:
    """Return gradients of one of two samples' outputs, whose elements have different weights."""
    rows = [
        y[sample]
        for y in results
        if isinstance(y, Tensor) and y.requires_grad and y.shape[:1] == (2,)
    ]
    if not rows or not inputs:
        return [None] * len(inputs)
    weights = [torch.sin(torch.arange(y.numel(), device=y.device) + 1.0) + 1.5 for y in rows]
    return torch.autograd.grad(
        rows,
        inputs,
        [w.to(y.dtype).view_as(y) for w, y in zip(weights, rows, strict=True)],
        retain_graph=True,
        allow_unused=True,
    )
