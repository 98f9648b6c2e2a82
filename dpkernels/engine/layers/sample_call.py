"""A call of a module, once more for every sample alone: under ``vmap``, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from dpkernels.engine.layers.caches import as_it_is, is_cache
from dpkernels.engine.layers.randomness import Replayed
from dpkernels.engine.layers.slots import Slots

# What ``vmap`` raises where it cannot go: values that decide what is computed, missing rules.
VMAP_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError)

# Outputs ``[B, ...]`` and gradients ``[B, *shape]``.
Repeated = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


@dataclass(frozen=True)
class SampleCall:
    """A call of a module that can be repeated for one sample.

    slots: the parameters whose gradients are wanted. plain: the module's forward pass.
    structure, constants: its arguments without the tensors, which are at ``positions``; axes: 0 for
    those with an axis of samples, else None.
    taps: for each floating output whether it has an axis of samples; in the backward pass, whether
    it has errors.
    autocast: device, whether it is on, and its dtype, as in the forward pass.
    """

    slots: Slots
    plain: Callable[..., Any]
    structure: TreeSpec
    constants: tuple[Any, ...]
    positions: tuple[int, ...]
    axes: tuple[int | None, ...]
    taps: tuple[bool, ...]
    autocast: tuple[str, bool, torch.dtype]

    def vmapped(
        self, errors: Sequence[Tensor], inputs: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> Repeated:
        """Return outputs and gradients of all samples, at once.

        errors: of the outputs that have samples. numbers: random ones that the call drew. Raises
        one of ``VMAP_ERRORS`` where ``vmap`` cannot go.
        """
        parameters = [p.detach() for p in self.slots.values()]
        batch = errors[0].shape[0]

        def of_one(
            index: Tensor, errors: tuple[Tensor, ...], inputs: tuple[Tensor, ...]
        ) -> Repeated:
            run: Callable[..., Any] = vjp
            replayed = _replayed(numbers, index, batch)
            outputs, pullback = run(
                lambda *values: self._outputs(values, inputs, replayed), *parameters
            )
            return outputs, pullback(errors)

        kind, enabled, dtype = self.autocast
        indices = torch.arange(batch, device=errors[0].device)
        mapped = vmap(of_one, in_dims=(0, 0, self.axes), randomness="error")
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
            found: Repeated = mapped(indices, tuple(errors), tuple(inputs))
        return found

    def looped(
        self, errors: Sequence[Tensor], inputs: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> Repeated:
        """Return the same from one pass after the other, for modules that ``vmap`` cannot follow.

        As many passes of one sample as there are samples.
        """
        parameters = [p.detach().requires_grad_() for p in self.slots.values()]
        batch = errors[0].shape[0]
        kind, enabled, dtype = self.autocast
        found = []
        for i in range(batch):
            own = [x if axis is None else x[i] for x, axis in zip(inputs, self.axes, strict=True)]
            with (
                torch.enable_grad(),
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False),
            ):
                outputs = self._outputs(parameters, own, _replayed(numbers, i, batch))
            for y, e in zip(outputs, errors, strict=True):
                if y.shape != e.shape[1:]:
                    raise RuntimeError(
                        f"a sample alone gives an output {list(y.shape)}, in the batch "
                        f"{list(e.shape[1:])}: the module mixes samples"
                    )
            followed = [k for k, y in enumerate(outputs) if y.requires_grad]
            gradients = [torch.zeros_like(p) for p in parameters]
            if followed:
                gradients = list(
                    torch.autograd.grad(
                        [outputs[k] for k in followed],
                        parameters,
                        [errors[k][i] for k in followed],
                        allow_unused=True,
                        materialize_grads=True,
                    )
                )
            found.append(([y.detach() for y in outputs], gradients))
        outputs_of, gradients_of = zip(*found, strict=True)
        return (
            tuple(map(torch.stack, zip(*outputs_of, strict=True))),
            tuple(map(torch.stack, zip(*gradients_of, strict=True))),
        )

    def _outputs(
        self,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        replayed: AbstractContextManager[Any],
    ) -> tuple[Tensor, ...]:
        """Return the outputs of one sample, from inputs without the axis of samples."""
        leaves = [as_it_is(x) if is_cache(x) else x for x in self.constants]
        for position, x, axis in zip(self.positions, inputs, self.axes, strict=True):
            leaves[position] = x if axis is None else x.unsqueeze(0)
        args, kwargs = tree_unflatten(leaves, self.structure)
        with self.slots.replaced(parameters), replayed:
            output = self.plain(*args, **kwargs)
        tapped = zip(floating(tree_leaves(output)), self.taps, strict=True)
        return tuple(y.squeeze(0) for y, has_samples in tapped if has_samples)


def _replayed(
    numbers: Sequence[Tensor], index: int | Tensor, batch: int
) -> AbstractContextManager[Any]:
    return Replayed(numbers, index, batch) if numbers else nullcontext()


def floating(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that can have errors."""
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
