"""Per-sample gradients of any module: its forward and backward pass again, each sample alone.

The module computes as ever, with taps on its outputs. When their errors arrive, it runs once more
on every sample alone, with the parameters as the arguments: under ``torch.func.vmap``, or in a loop
where ``vmap`` cannot follow it. Random numbers are those of the forward pass. Samples alone must
give what they gave in the batch, or else it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.broadcast import agree, changed_buffers, unchanged_buffers
from dpkernels.engine.layers.caches import as_it_is, guard, is_cache
from dpkernels.engine.layers.flops import Flops
from dpkernels.engine.layers.layer import Unsupported
from dpkernels.engine.layers.randomness import Recorded
from dpkernels.engine.layers.sample_call import VMAP_ERRORS, Repeated, SampleCall, floating
from dpkernels.engine.layers.slots import Slots

_WAY_OUT = (
    "build it from layers of torch.nn, or freeze its own parameters with requires_grad_(False)"
)

# Gets per-sample gradients of all slots, in their order.
Deliver = Callable[..., None]


class Tap(torch.autograd.Function):
    """The identity on a module's outputs, whose backward pass delivers per-sample gradients."""

    @staticmethod
    def forward(
        ctx: Any, site: Site, deliver: Deliver, rule: Fallback, call: SampleCall, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs, which come first in ``tensors``.

        Inputs, parameters and random numbers follow. Parameters are there so that outputs need a
        gradient.
        """
        outputs, others = tensors[: len(call.taps)], tensors[len(call.taps) :]
        ctx.site, ctx.deliver, ctx.rule, ctx.call = site, deliver, rule, call
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
        rule: Fallback = ctx.rule
        saved, count = ctx.saved_tensors, sum(call.taps)
        outputs, others = saved[:count], saved[count:]
        inputs, numbers = others[: len(call.axes)], others[len(call.axes) + rule.size :]
        if any(e is not None and not tap for e, tap in zip(errors, call.taps, strict=True)):
            raise RuntimeError(
                f"{rule.described}: an output without an axis of samples is part of the loss, so "
                "that gradients cannot be told apart; return one value for each sample"
            )
        own = [e for e, has_samples in zip(errors, call.taps, strict=True) if has_samples]
        # Outputs that the loss does not depend on may mix samples: similarities of a batch.
        known = [(e, y) for e, y in zip(own, outputs, strict=True) if e is not None]
        if known:
            call = replace(call, taps=tuple(e is not None for e in errors))
            reached, met = zip(*known, strict=True)
            ctx.deliver(*rule.gradients(ctx.site, call, reached, inputs, met, numbers))
        return (None, None, None, None, *errors, *(None for _ in others))


tap: Callable[..., tuple[Tensor, ...]] = Tap.apply


class Fallback:
    """The rule for some parameters inside of one module: what it has learnt about its calls.

    described: the module, for messages. slots: the parameters. size: how many there are.
    flops: of a repeated forward and backward pass, at the shapes seen first.
    looped: why the samples run one after the other, if they do.
    """

    def __init__(self, described: str, module: nn.Module, slots: Slots) -> None:
        self.described, self._module, self._slots = described, module, slots
        self.size = len(slots.values())
        self._draws: dict[bool, bool] = {}  # whether it draws random numbers, by training mode
        self._common: set[int] = set()  # inputs that were seen without an axis of samples
        self.flops: int | None = None
        self.looped: str | None = None

    def forward(
        self,
        site: Site,
        deliver: Deliver,
        plain: Callable[..., Any],
        batch: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute the module's output, tapped; its backward pass calls ``deliver``."""
        leaves, structure = tree_flatten((args, kwargs))
        self.note_common(leaves, batch)
        positions = tuple(k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        inputs = [leaves[k] for k in positions]
        constants = tuple(
            None if isinstance(x, Tensor) else as_it_is(x) if is_cache(x) else x for x in leaves
        )
        buffers = list(self._module.buffers())
        versions, states = _versions(inputs), _versions(buffers)
        parameters = self._slots.values()
        training = self._module.training
        # To listen costs 2 us an operation: where the first call drew nothing, no call does.
        random = Recorded() if self._draws.get(training, True) else None
        with self._slots.replaced([p.detach() for p in parameters]), random or nullcontext():
            output = plain(*args, **kwargs)
        numbers = [] if random is None else random.numbers
        self._draws[training] = bool(numbers)
        if states != _versions(buffers):
            raise changed_buffers(self.described)
        if versions != _versions(inputs):
            raise Unsupported(
                f"{self.described}: its forward pass changes an input in place, so that it cannot "
                "be repeated for each sample; write the change out of place"
            )
        results, result_structure = tree_flatten(output)
        self._check_types(results)
        outputs = floating(results)
        if not outputs:
            return output
        kind = outputs[0].device.type
        call = SampleCall(
            self._slots,
            plain,
            structure,
            constants,
            positions,
            self._axes(positions),
            tuple(y.dim() > 0 and y.shape[0] == batch for y in outputs),
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )
        tensors = *outputs, *inputs, *parameters, *numbers
        tapped = iter(tap(site, deliver, self, call, *tensors))
        results = [next(tapped) if floating([y]) else y for y in results]
        return tree_unflatten(results, result_structure)

    def note_common(self, leaves: Sequence[Any], batch: int) -> None:
        """Note which leaves of the arguments have no axis of samples: they never have one."""
        for k, x in enumerate(leaves):
            if isinstance(x, Tensor) and (x.dim() == 0 or x.shape[0] != batch):
                self._common.add(k)

    def _axes(self, positions: Sequence[int]) -> tuple[int | None, ...]:
        """Return where samples are; an input that once had none has none, whatever its size."""
        return tuple(None if k in self._common else 0 for k in positions)

    def _check_types(self, results: Sequence[Any]) -> None:
        for leaf in results:
            if is_cache(leaf):
                guard(leaf, self.described)
            elif leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
                raise Unsupported(
                    f"{self.described}: it returns a {type(leaf).__name__}, inside of which "
                    "tensors cannot be followed; return tensors, tuples, lists or dicts"
                )

    def gradients(
        self,
        site: Site,
        call: SampleCall,
        errors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        numbers: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return per-sample gradients of a call with these inputs, outputs and errors of them.

        numbers: random ones that the call drew. Raises Unsupported unless samples alone give the
        outputs that they gave in the batch.
        """
        if outputs[0].shape[0] == 0:
            return tuple(p.new_zeros(0, *p.shape) for p in self._slots.values())
        with site.paused():
            if self.flops is None:
                with unchanged_buffers(self.described, self._module), Flops() as counted:
                    again, gradients = self._repeated(call, errors, inputs, numbers)
                self.flops = counted.total
            else:
                again, gradients = self._repeated(call, errors, inputs, numbers)
        if not agree(again, outputs):
            raise Unsupported(
                f"{self.described}: a sample alone gives another output than it does in the batch: "
                "the module mixes samples, draws random numbers that cannot be repeated, or takes "
                "a tensor without samples whose first axis is as long as the batch by chance (pass "
                f"that as [1, ...]); {_WAY_OUT}"
            )
        return gradients

    def cost(self) -> tuple[int, str]:
        """Return flops of the repeated pass, and what it is, for a plan."""
        how = "all samples at once" if self.looped is None else "one sample after the other"
        return self.flops or 0, (
            f"fallback: the module runs forward and backward once more, {how}, each alone, and a "
            "gradient for each sample is stored"
        )

    def _repeated(
        self,
        call: SampleCall,
        errors: Sequence[Tensor],
        inputs: Sequence[Tensor],
        numbers: Sequence[Tensor],
    ) -> Repeated:
        """Return outputs and gradients once more; once looped, always looped."""
        if self.looped is None:
            try:
                return call.vmapped(errors, inputs, numbers)
            except VMAP_ERRORS as error:
                self.looped = f"torch.func.vmap: {error}"
        try:
            return call.looped(errors, inputs, numbers)
        except VMAP_ERRORS as error:
            raise Unsupported(
                f"{self.described}: its forward pass cannot be repeated for each sample alone "
                f"({error}; {self.looped}); {_WAY_OUT}"
            ) from error


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was changed in place."""
    return [x._version for x in tensors]
