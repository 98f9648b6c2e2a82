"""What a model's modules are given: samples first, windows of samples, or neither.

The model runs on one sample and on two. An axis that doubles holds samples, one that stays does
not: a matter of the model, whatever the lengths of a batch. Only shapes are looked at. An operation
whose output is as long as its values say (a boolean mask) makes shapes a matter of the samples, and
is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpkernels.engine.layers.caches import is_cache

if TYPE_CHECKING:
    from dpkernels.engine.capture import Follow

Within = tuple[nn.Module, ...]
FollowedBy = Callable[["Follow"], AbstractContextManager[None]]
# Properties and methods that give a parameter's values away without a gradient, or none of them.
_NO_GRADIENT = frozenset(
    {"detach", "detach_", "data", "requires_grad_", "__repr__", "register_hook"}
)


@dataclass
class Call:
    """One call of a module.

    within: the modules that were running, outermost first.
    inputs, outputs: shapes of tensors, of outputs those that can have errors.
    opaque: the type of an output that cannot be looked into, if there is one.
    """

    within: Within
    inputs: list[torch.Size]
    outputs: list[torch.Size] = field(default_factory=list)
    opaque: str | None = None

    def end(self, output: Any) -> None:
        """Note what the module returned."""
        for x in tree_leaves(output):
            if isinstance(x, Tensor):
                if x.is_floating_point():
                    self.outputs.append(x.shape)
            elif x is not None and not (isinstance(x, bool | int | float | str) or is_cache(x)):
                self.opaque = type(x).__name__


@dataclass
class Seen:
    """What one run of the model showed.

    calls: of each module. uses: the modules that were running when a parameter was used, innermost
    last. looked_up: shapes of indices, by the module. output: tensors that the model returned.
    ragged: whether the values of a tensor decided a shape.
    """

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    uses: dict[nn.Parameter, list[Within]] = field(default_factory=dict)
    looked_up: dict[nn.Module, list[torch.Size]] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    ragged: bool = False


def look(
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: Iterable[nn.Parameter],
    followed_by: FollowedBy,
) -> Seen:
    """Run ``forward``, that of ``model``, and return what its modules were given.

    followed_by: lets a function make the calls of layers, as ``Capture`` routes them.
    """
    seen = Seen()
    uses = set(parameters)
    with _followed(model, seen, followed_by) as running, _Ragged(seen), _Uses(uses, seen, running):
        whole = Call((model,), _shapes(tree_leaves((args, kwargs))))
        seen.calls[model] = [whole]
        running.append(model)
        output = forward(*args, **kwargs)
        whole.end(output)
    seen.output = [y for y in tree_leaves(output) if isinstance(y, Tensor)]
    return seen


@contextmanager
def _followed(model: nn.Module, seen: Seen, followed_by: FollowedBy) -> Iterator[list[nn.Module]]:
    """Note every call of the modules inside of ``model``; yield those that are running."""
    running: list[nn.Module] = []
    open_calls: list[Call] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(module)
        call = Call(tuple(running), _shapes(tree_leaves((args, kwargs))))
        seen.calls.setdefault(module, []).append(call)
        open_calls.append(call)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running.pop()
        open_calls.pop().end(output)

    def call(
        module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if running[-1] is module:
            return plain(*args, **kwargs)
        # By ``module.forward()``, which goes past hooks: so a model's shell calls it.
        enter(module, args, kwargs)
        output = plain(*args, **kwargs)
        leave(module, args, kwargs, output)
        return output

    handles = []
    for module in model.modules():
        if module is not model:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        with followed_by(call):
            yield running
    finally:
        for handle in handles:
            handle.remove()


class _Ragged(TorchDispatchMode):
    """Notes operations whose values decide the shape of what they return."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func``."""
        if torch.Tag.dynamic_output_shape in func.tags:
            # Indices have a length of their own, unless they are a mask.
            indices = args[1] if func.overloadpacket is torch.ops.aten.index else [None]
            given = [x for x in tree_leaves(indices) if isinstance(x, Tensor)]
            masks = [x for x in given if x.dtype in (torch.bool, torch.uint8)]
            self._seen.ragged |= not given or bool(masks)
        return func(*args, **(kwargs or {}))


class _Uses(TorchFunctionMode):
    """Notes which modules are running when a parameter is used."""

    def __init__(
        self, parameters: set[nn.Parameter], seen: Seen, running: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self._parameters, self._seen, self._running = parameters, seen, running

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func``."""
        output = func(*args, **(kwargs or {}))
        owner = getattr(func, "__self__", None)
        name = getattr(owner if func.__name__ == "__get__" else func, "__name__", "")
        if name in _NO_GRADIENT or not any(isinstance(y, Tensor) for y in tree_leaves(output)):
            return output
        for x in tree_leaves((args, kwargs or {})):
            if isinstance(x, nn.Parameter) and x in self._parameters:
                self._seen.uses.setdefault(x, []).append(tuple(self._running))
        if func is functional.embedding and args[1] in self._parameters:
            self._seen.looked_up.setdefault(self._running[-1], []).append(args[0].shape)
        return output


def windows(one: torch.Size, two: torch.Size) -> int:
    """Return how many rows of the first axis a sample has; 0 if it does not grow with samples.

    one, two: the shapes of a tensor in a run of one sample, and of two.
    """
    if not one or not two or one[0] == 0 or two[0] != 2 * one[0]:
        return 0
    return one[0]


def resized(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, samples: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments with the first samples alone; a single one is repeated."""
    leaves, structure = tree_flatten((args, kwargs))
    rows = torch.arange(samples) % batch
    chosen = [
        (x.detach()[rows.to(x.device)] if x.shape[:1] == (batch,) else x.detach().clone())
        if isinstance(x, Tensor)
        else x
        for x in leaves
    ]
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(chosen, structure)
    return found


def _shapes(leaves: Iterable[Any]) -> list[torch.Size]:
    return [x.shape for x in leaves if isinstance(x, Tensor)]
