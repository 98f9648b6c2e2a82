"""Activations and errors of every layer, taken out of ordinary forward and backward passes.

Each trained layer's ``forward`` goes through an autograd function that keeps what came in, and
whose backward pass hands over what came back instead of computing a weight gradient. Parameters
never get a gradient from autograd.

One call of the model is one ``Pass``: index i of the first axis is sample i in all of its layers. A
backward pass belongs to one pass. Two calls in one backward pass might be about the same people or
different ones, which nobody can tell from outside: that is refused, unless the caller says that
they are the same. Then calls that follow each other without a backward pass are one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from dpkernels.engine.sharding import guard_unsharded

if TYPE_CHECKING:
    from dpkernels.engine.layers.layer import Layer, Norms
    from dpkernels.engine.layers.lifted import Lift
    from dpkernels.engine.lifting import Lifting

_ONE_CALL = (
    "call the model once for each backward(), or put the calls into the forward() of one module "
    "if they are about the same samples"
)

# What one layer hands over for one use: activations and errors, or what else its rule needs.
Captured = tuple[Tensor, ...]
# Gets layers, and those that deliver in their place.
Replace = Callable[["dict[Layer, Layer]"], None]


@dataclass(eq=False)
class Pass:
    """One call of the model, or several about the same samples.

    batch: how many samples went in; None until the first layer shows it.
    whole: whether it is a call of the model itself, not of some of its layers one by one.
    again: whether it repeats, for a checkpoint, what another pass did.
    calls: how often each layer was called.
    task: the backward pass that it was seen in.
    uses: what has been handed over of layers that were called several times or share parameters.
    norms: of the layers that are complete.
    """

    batch: int | None = None
    whole: bool = True
    again: bool = False
    calls: dict[Layer, int] = field(default_factory=dict)
    task: int | None = None
    uses: dict[Layer, list[Captured]] = field(default_factory=dict)
    norms: dict[Layer, Norms] = field(default_factory=dict)


class Site:
    """One use of one layer in one pass: where its backward pass delivers."""

    __slots__ = ("_capture", "_pass", "layer")

    def __init__(self, capture: Capture, layer: Layer, current: Pass) -> None:
        self._capture = capture
        self.layer = layer
        self._pass = current

    @property
    def batch(self) -> int | None:
        """How many samples the pass has, if that is known."""
        return self._pass.batch

    def of(self, layer: Layer) -> Site:
        """Return where one use of a sublayer delivers to, in the same pass."""
        if not self._pass.again:
            self._pass.calls[layer] = self._pass.calls.get(layer, 0) + 1
        return Site(self._capture, layer, self._pass)

    def paused(self) -> AbstractContextManager[None]:
        """Let the model's layers compute as if nobody listened."""
        return self._capture.paused()

    def deliver(self, *tensors: Tensor) -> None:
        """Hand over what the layer's rule needs; called in the backward pass."""
        self._capture.take(self._pass, self.layer, tensors)


class InPlace:
    """A forward pass in place of the module's own. A copy of the module has its own again.

    Copied as it is, it would go on computing with the weights of the module it was made for.
    """

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], capture: Capture | None = None
    ) -> None:
        update_wrapper(self, module.forward)
        self._module, self._call = module, call
        self.capture = capture  # that the whole model is attached to

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what takes the place of the module's own."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied = memo[id(self._module)]
        return MethodType(type(copied).forward, copied)


def has_forward_in_place(module: nn.Module) -> bool:
    """Return whether the module computes something else than its class says."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def capture_of(model: nn.Module) -> Capture | None:
    """Return what the model is attached to, if it is."""
    own = vars(model).get("forward")
    return own.capture if isinstance(own, InPlace) else None


class Capture:
    """Collects the uses of a model's layers and says when a layer, and a pass, is complete."""

    def __init__(
        self,
        layer_complete: Callable[[Pass, Layer, Captured], None],
        pass_complete: Callable[[Pass], None],
        same_samples: bool = False,
    ) -> None:
        self._layer_complete = layer_complete
        self._pass_complete = pass_complete
        self._current: Pass | None = None  # the call of the model that is running
        self._loose = Pass(whole=False)  # calls of layers on their own
        self._latest = self._loose  # the pass that a layer was called in last
        self._same_samples = same_samples  # in all calls until a backward pass
        self._open: Pass | None = None  # the pass of the backward pass that is running
        self._paused = False
        self.layers: tuple[Layer, ...] = ()  # of the model that this is attached to
        self._undo: list[Callable[[], None]] = []
        self._model: nn.Module | None = None
        self._lifting: Lifting | None = None
        self._replace: Replace = lambda replaced: None

    def attach(self, model: nn.Module, layers: Sequence[Layer]) -> Callable[[], None]:
        """Route the layers' forward passes through here; return what undoes it."""
        undo = self._undo = []
        self._model = model
        self.layers = tuple(flattened(layers))
        for layer in layers:
            undo.append(self._route(layer))
        for layer in self.layers:
            undo += [_guard(layer.describe(), p) for p in layer.parameters.values()]
        undo += [guard_unsharded(model, _guard), self._enclose(model)]

        def detach() -> None:
            for one in reversed(undo):
                one()

        return detach

    def lift(self, lifting: Lifting, replace: Replace) -> None:
        """Serve layers that have no samples at their own input by modules around them.

        replace: told which layers deliver in place of others.
        """
        self._lifting, self._replace = lifting, replace

    def _look_for_lifts(
        self, whole: list[Callable[..., Any]], args: Any, kwargs: Any, batch: int
    ) -> None:
        """Look at the model, and route what must be lifted; ``whole`` is its own forward pass."""
        assert self._lifting is not None
        with self.paused():
            lifts = self._lifting.find(whole[0], args, kwargs, batch)
        for lift in lifts:
            if lift.module is self._model:
                whole[0] = self._lifted(lift, whole[0])
            else:
                self._undo.append(self._reroute(lift))
            self._replace(lift.replaced)
        replaced = {old: new for lift in lifts for old, new in lift.replaced.items()}
        self.layers = tuple(replaced.get(layer, layer) for layer in self.layers)

    def _reroute(self, lift: Lift) -> Callable[[], None]:
        module = lift.module
        before = vars(module).get("forward")
        module.forward = InPlace(module, self._lifted(lift, module.forward))
        if before is None:
            return lambda: delattr(module, "forward")
        return lambda: setattr(module, "forward", before)

    def _lifted(self, lift: Lift, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._paused or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return lift.forward(self, plain, args, kwargs)

        return forward

    def _route(self, layer: Layer) -> Callable[[], None]:
        module = layer.module
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if layer.lifted or self._paused or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return layer.forward(self.site(layer), plain, *args, **kwargs)

        # An attribute of the object hides the class's method, until it is deleted.
        module.forward = InPlace(module, forward)
        return lambda: delattr(module, "forward")

    def _enclose(self, model: nn.Module) -> Callable[[], None]:
        """Make every call of the model a pass, which is over even if it is interrupted."""
        routed = vars(model).get("forward")
        whole = [model.forward]
        seen: set[Any] = set()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._lifting is not None and torch.is_grad_enabled() and not self._paused:
                batch, form = _samples_of((*args, *kwargs.values())), _form(args, kwargs)
                if batch and form not in seen:
                    self._look_for_lifts(whole, args, kwargs, batch)
                    seen.add(form)
            self._begin(args, kwargs)
            try:
                return whole[0](*args, **kwargs)
            finally:
                self._current = None

        model.forward = InPlace(model, forward, self)
        if routed is None:
            return lambda: delattr(model, "forward")
        return lambda: setattr(model, "forward", routed)

    def end_calls(self) -> None:
        """Say that calls of the model from now on are about other samples than those before."""
        self._latest = self._loose

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let layers compute as if nobody listened."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def redirected(
        self,
        layer_complete: Callable[[Pass, Layer, Captured], None],
        pass_complete: Callable[[Pass], None],
    ) -> Iterator[None]:
        """Let passes inside deliver to somebody else; those outside know nothing of them.

        Everything that is kept between calls is put aside, so a forward pass from before may have
        its backward pass afterwards. Raises RuntimeError inside of a backward pass.
        """
        if _backward_task() != -1:
            raise RuntimeError(
                "a backward pass is running, in which no pass of another kind can begin; refresh "
                "preconditioners between backward() and the next forward pass"
            )
        before = dict(vars(self))
        vars(self).update(vars(Capture(layer_complete, pass_complete)))
        try:
            yield
        finally:
            vars(self).update(before)

    def _begin(self, args: Any, kwargs: Any) -> None:
        # A pass whose backward pass was broken off is dropped with all it held.
        if _backward_task() == -1:
            self._open = None
        batch = _samples_of((*args, *kwargs.values()))
        latest = self._latest
        if self._same_samples and latest.whole and latest.task is None and latest.batch == batch:
            self._current = latest
        else:
            self._current = Pass(batch)

    def site(self, layer: Layer) -> Site:
        """Return where this call of ``layer`` delivers to."""
        if _backward_task() != -1:
            # Of as many samples as the first time, so that the same tensors are saved.
            first = self._open or self._latest
            return Site(self, layer, Pass(first.batch if first.whole else None, again=True))
        if self._current is None and self._loose.task is not None:
            self._loose = Pass(whole=False)
        current = self._latest = self._current or self._loose
        current.calls[layer] = current.calls.get(layer, 0) + 1
        return Site(self, layer, current)

    def take(self, current: Pass, layer: Layer, tensors: Captured) -> None:
        """Accept what a use of ``layer`` delivers."""
        self._enter(current)
        tensors = layer.by_sample(tensors, current.batch)
        batch = tensors[0].shape[0]
        if current.batch is None:
            current.batch = batch
        if batch != current.batch:
            raise RuntimeError(
                f"{layer.describe()}: the first axis of its input has {batch} elements, but the "
                f"model was called with {current.batch} samples; samples must be the first axis in "
                "every trained layer (batch_first=True), so that gradients can be told apart"
            )
        if current.calls[layer] == 1 and not layer.shared:
            self._layer_complete(current, layer, tensors)
            return
        uses = current.uses.setdefault(layer, [])
        if uses and not current.whole:
            raise RuntimeError(
                f"{layer.describe()} was called twice, outside of a call of the model: whether "
                f"about the same samples is not known; {_ONE_CALL}"
            )
        uses.append(tensors)

    def _enter(self, current: Pass) -> None:
        """Make ``current`` the pass that this backward pass belongs to, or say why it cannot be."""
        task = _backward_task()
        if current is self._open and current.task == task:
            return
        if current.again or (current.task is not None and current.task != task):
            raise RuntimeError(
                "a second backward pass went through one call of the model: the parts of a "
                "sample's gradient would be clipped apart; add the losses up and call backward() "
                "once, and use gradient checkpointing with use_reentrant=False"
            )
        if self._open is not None and self._open.task == task:
            raise RuntimeError(
                "one backward pass went through two calls of the model: sample i of one may or may "
                f"not be the person of sample i of the other; {_ONE_CALL}"
            )
        current.task = task
        self._open = current
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._complete(current))

    def _complete(self, current: Pass) -> None:
        if self._open is current:
            self._open = None
            self._pass_complete(current)


def _guard(owner: str, parameter: Tensor) -> Callable[[], None]:
    """Raise as soon as autograd itself computes a gradient of a parameter."""

    def refuse(gradient: Tensor | None) -> None:
        # The captured layers' own gradient is None.
        if gradient is not None:
            raise RuntimeError(
                f"a parameter of {owner} is used outside of its layer's forward pass, so that a "
                "part of its gradient would not be clipped; use the layer only by calling it, and "
                "decay weights in the optimizer instead of the loss"
            )

    remove: Callable[[], None] = parameter.register_hook(refuse).remove
    return remove


def flattened(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers that have parameters: sublayers in place of what they make up."""
    parts = (part for layer in layers for part in layer.sublayers or (layer,))
    return [part for part in parts if part.parameters]


def _form(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return what tells forms of arguments apart: kinds and dimensions, but not lengths."""
    leaves, structure = tree_flatten((args, kwargs))
    return (structure, *((x.dim(), x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves))


def _samples_of(inputs: Sequence[Any]) -> int | None:
    """Return the first axis of the first tensor that has one, in whatever it is packed."""
    for given in inputs:
        # Most models get tensors, for which a walk through a tree takes 25 us too many.
        for leaf in (given,) if isinstance(given, Tensor) else tree_leaves(given):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.shape[0]
    return None


def _backward_task() -> int:
    """Return the number of the backward pass that is running, or -1."""
    return torch._C._current_graph_task_id()
