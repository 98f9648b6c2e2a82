"""Per-sample gradients of any module: its forward and backward pass again, under ``vmap``.

The module computes as ever, with taps on its outputs. When their errors arrive, it runs once more
on every sample alone (``torch.func.vmap`` of ``vjp``), with its direct parameters as the arguments.
Samples alone must give what they gave in the batch, or else it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import vjp, vmap
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.broadcast import (
    agree,
    changed_buffers,
    current_values,
    replaced,
    unchanged_buffers,
)
from dpkernels.engine.layers.layer import Layer, Unsupported

_WAY_OUT = (
    "build it from layers of torch.nn, or freeze its own parameters with requires_grad_(False)"
)


@dataclass(frozen=True)
class SampleCall:
    """A call of a module that can be repeated for one sample.

    plain: the module's forward pass. structure, constants: its arguments without the tensors, which
    are at ``positions``; axes: 0 for those with an axis of samples, else None.
    taps: for each floating output whether it has an axis of samples.
    autocast: device, whether it is on, and its dtype, as in the forward pass.
    """

    layer: Layer
    plain: Callable[..., Any]
    structure: TreeSpec
    constants: tuple[Any, ...]
    positions: tuple[int, ...]
    axes: tuple[int | None, ...]
    taps: tuple[bool, ...]
    autocast: tuple[str, bool, torch.dtype]

    def again(
        self, errors: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return outputs ``[B, ...]`` once more, and gradients ``[B, *shape]`` of each parameter.

        errors: of the outputs that have samples. Raises Unsupported where ``vmap`` cannot go.
        """
        parameters = [p.detach() for p in current_values(self.layer)]

        def of_one(errors: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Any:
            run: Callable[..., Any] = vjp
            outputs, pullback = run(lambda *values: self._outputs(values, inputs), *parameters)
            return outputs, pullback(errors)

        kind, enabled, dtype = self.autocast
        try:
            with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
                outputs, gradients = vmap(of_one, in_dims=(0, self.axes), randomness="error")(
                    tuple(errors), tuple(inputs)
                )
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise Unsupported(
                f"{self.layer.describe()}: its forward pass cannot be repeated for each sample "
                f"alone (torch.func.vmap: {error}); {_WAY_OUT}"
            ) from error
        return outputs, gradients

    def _outputs(
        self, parameters: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the outputs of one sample, from inputs without the axis of samples."""
        leaves = list(self.constants)
        for position, x, axis in zip(self.positions, inputs, self.axes, strict=True):
            leaves[position] = x if axis is None else x.unsqueeze(0)
        args, kwargs = tree_unflatten(leaves, self.structure)
        names = self.layer.parameters
        with replaced(self.layer.module, dict(zip(names, parameters, strict=True))):
            outputs = floating(tree_leaves(self.plain(*args, **kwargs)))
        return tuple(y.squeeze(0) for y, tap in zip(outputs, self.taps, strict=True) if tap)


class Tap(torch.autograd.Function):
    """The identity on a module's outputs, whose backward pass delivers gradients to a site."""

    @staticmethod
    def forward(
        ctx: Any, site: Site, rule: Fallback, call: SampleCall, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs, which come first in ``tensors``; inputs and parameters follow."""
        outputs, others = tensors[: len(call.taps)], tensors[len(call.taps) :]
        ctx.site, ctx.rule, ctx.call = site, rule, call
        # Copies, because what follows may change the outputs in place.
        kept = [y.clone() for y, has_samples in zip(outputs, call.taps, strict=True) if has_samples]
        ctx.save_for_backward(*kept, *others)
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *errors: Tensor | None) -> tuple[Any, ...]:
        """Deliver, and let the errors pass."""
        call: SampleCall = ctx.call
        saved, count = ctx.saved_tensors, sum(call.taps)
        outputs, inputs = saved[:count], saved[count : count + len(call.axes)]
        own = [e for e, has_samples in zip(errors, call.taps, strict=True) if has_samples]
        if sum(e is not None for e in own) < sum(e is not None for e in errors):
            raise RuntimeError(
                f"{call.layer.describe()}: an output without an axis of samples is part of the "
                "loss, so that gradients cannot be told apart; return one value for each sample"
            )
        known = [torch.zeros_like(y) if e is None else e for y, e in zip(outputs, own, strict=True)]
        ctx.site.deliver(*ctx.rule.gradients(ctx.site, call, known, inputs, outputs))
        return (None, None, None, *errors, *(None for _ in saved[count:]))


tap: Callable[..., tuple[Tensor, ...]] = Tap.apply


def floating(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that can have errors."""
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


class Fallback:
    """The rule for one layer: what it has learnt about the layer's calls.

    flops: of a repeated forward and backward pass, at the shapes seen first.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._common: set[int] = set()  # inputs that were seen without an axis of samples
        self.flops: int | None = None

    def forward(
        self,
        site: Site,
        plain: Callable[..., Any],
        batch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute the module's output, tapped."""
        layer = self._layer
        _check_dropout(layer)
        leaves, structure = tree_flatten((args, kwargs))
        positions = tuple(k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        inputs = [leaves[k] for k in positions]
        buffers = list(layer.module.buffers())
        versions, states = _versions(inputs), _versions(buffers)
        parameters = current_values(layer)
        frozen = [p.detach() for p in parameters]
        with replaced(layer.module, dict(zip(layer.parameters, frozen, strict=True))):
            output = plain(*args, **kwargs)
        if states != _versions(buffers):
            raise changed_buffers(layer)
        if versions != _versions(inputs):
            raise Unsupported(
                f"{layer.describe()}: its forward pass changes an input in place, so that it "
                "cannot be repeated for each sample; write the change out of place"
            )
        results, result_structure = tree_flatten(output)
        _check_types(layer, results)
        outputs = floating(results)
        if not outputs:
            return output
        kind = inputs[0].device.type
        call = SampleCall(
            layer,
            plain,
            structure,
            tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            positions,
            self._axes(positions, inputs, batch),
            tuple(y.dim() > 0 and y.shape[0] == batch for y in outputs),
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )
        tapped = iter(tap(site, self, call, *outputs, *inputs, *parameters))
        results = [next(tapped) if floating([y]) else y for y in results]
        return tree_unflatten(results, result_structure)

    def _axes(
        self, positions: Sequence[int], inputs: Sequence[Tensor], batch: int
    ) -> tuple[int | None, ...]:
        """Return where samples are; an input that once had none has none, whatever its size."""
        for k, x in zip(positions, inputs, strict=True):
            if x.dim() == 0 or x.shape[0] != batch:
                self._common.add(k)
        return tuple(None if k in self._common else 0 for k in positions)

    def gradients(
        self,
        site: Site,
        call: SampleCall,
        errors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return per-sample gradients of a call with these inputs, outputs and errors of them.

        Raises Unsupported unless samples alone give the outputs that they gave in the batch.
        """
        layer = self._layer
        if outputs[0].shape[0] == 0:
            return tuple(p.new_zeros(0, *p.shape) for p in current_values(layer))
        with site.paused():
            if self.flops is None:
                # Imported here because it brings triton along.
                from torch.utils.flop_counter import FlopCounterMode

                counter = FlopCounterMode(display=False)
                with unchanged_buffers(layer), counter:
                    again, gradients = call.again(errors, inputs)
                self.flops = counter.get_total_flops()
            else:
                again, gradients = call.again(errors, inputs)
        if not agree(again, outputs):
            raise Unsupported(
                f"{layer.describe()}: a sample alone gives another output than it does in the "
                "batch: the module mixes samples, or takes a tensor without samples whose first "
                f"axis is as long as the batch by chance (pass that as [1, ...]); {_WAY_OUT}"
            )
        return gradients


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was changed in place."""
    return [x._version for x in tensors]


def _check_dropout(layer: Layer) -> None:
    for name, module in layer.module.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise Unsupported(
                f"{layer.describe()}: its parameters {', '.join(layer.parameters)} are served by "
                f"running it again under vmap, but {name or 'it'} ({type(module).__name__}) is "
                "active inside and would draw other masks; move these parameters into a small "
                "module of their own, set p=0, or freeze them with requires_grad_(False)"
            )


def _check_types(layer: Layer, results: Sequence[Any]) -> None:
    for leaf in results:
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            raise Unsupported(
                f"{layer.describe()}: it returns a {type(leaf).__name__}, inside of which tensors "
                "cannot be followed; return tensors, tuples, lists or dicts"
            )
