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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dpkernels.engine.arguments import Arguments, check_can_be_opened, form_of, samples_of
from dpkernels.engine.first_call import examine, look_up
from dpkernels.engine.in_place import InPlace
from dpkernels.engine.sharding import guard_unsharded, is_sharded
from dpkernels.engine.state import State

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
SHARDED = "sharded"
# Gets layers, and those that deliver in their place.
Replace = Callable[["dict[Layer, Layer]"], None]
# Gets a layer, and what it is called with.
Note = Callable[["Layer", tuple[Any, ...]], None]
# Gets a layer's module, its own forward pass, and what it is called with; returns the output.
Follow = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


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
        self._note: Note | None = None  # what is told of calls, while the model is looked at
        self._follow: Follow | None = None  # what makes them then
        self._wholes: list[Tensor] = []  # parameters that FSDP has put together
        # Where autograd would add up a parameter's gradient. Kept, they stay the same for good.
        self._nodes: dict[Tensor, Node] = {}
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
        undo += [guard_unsharded(model, self._guard_whole), self._enclose(model)]

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
            lifts = self._lifting.find(whole[0], args, kwargs, batch, self._followed_by)
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

    def _guard_whole(self, owner: str, whole: Tensor) -> Callable[[], None]:
        self._wholes.append(whole)
        return _guard(owner, whole)

    def _route(self, layer: Layer) -> Callable[[], None]:
        module = layer.module
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if layer.lifted:
                return plain(*args, **kwargs)
            if self._follow is not None:
                return self._follow(module, plain, args, kwargs)
            if self._note is not None:
                self._note(layer, (*args, *kwargs.values()))
            if self._paused or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return layer.forward(self.site(layer), plain, *args, **kwargs)

        # An attribute of the object hides the class's method, until it is deleted.
        module.forward = InPlace(module, forward)
        return lambda: delattr(module, "forward")

    def _enclose(self, model: nn.Module) -> Callable[[], None]:
        """Make every call of the model a pass, which is over even if it is interrupted."""
        routed = vars(model).get("forward")
        whole = [model.forward]
        state = State(model, (p for layer in self.layers for p in layer.parameters.values()))
        sharded = any(is_sharded(parameter) for parameter in model.parameters())
        modules = list(model.modules())
        seen: set[Any] = set()

        def forward(*args: Any, **kwargs: Any) -> Any:
            state.check_structure()
            state.check_modes()
            batch = samples_of((*args, *kwargs.values()))
            if torch.is_grad_enabled() and _backward_task() == -1:
                check_can_be_opened(args, kwargs)
                form = SHARDED if sharded else form_of(args, kwargs, batch == 1, modules, len(seen))
                if (batch or sharded) and form not in seen:
                    if batch and self._lifting is not None:
                        self._look_for_lifts(whole, args, kwargs, batch)
                    arguments = Arguments.of(args, kwargs, batch or 0)
                    if sharded:
                        look_up(model, whole[0], self, state, arguments)
                    if sharded or examine(model, whole[0], self, state, arguments):
                        seen.add(form)
            before = state.versions()
            with self.one_pass(batch):
                output = whole[0](*args, **kwargs)
            state.check_unchanged(before)
            return output

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
        self._wholes, self._nodes = before["_wholes"], before["_nodes"]
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def _followed_by(self, follow: Follow) -> Iterator[None]:
        """Let ``follow`` make every call of a layer, ``module.forward()`` too."""
        self._follow = follow
        try:
            yield
        finally:
            self._follow = None

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Tell ``note`` of every call of a layer, and let layers compute as if nobody listened."""
        self._note = note
        try:
            with self.paused():
                yield
        finally:
            self._note = None

    @contextmanager
    def one_pass(self, batch: int | None) -> Iterator[None]:
        """Let what layers deliver be about the same ``batch`` samples."""
        # A pass whose backward pass was broken off is dropped with all it held.
        if _backward_task() == -1:
            self._open = None
        latest = self._latest
        if self._same_samples and latest.whole and latest.task is None and latest.batch == batch:
            self._current = latest
        else:
            self._current = Pass(batch)
        try:
            yield
        finally:
            self._current = None

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
        """Accept what a use of ``layer`` delivers, in a pass that trains it."""
        if not self._accumulates(layer):
            return
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

    def _accumulates(self, layer: Layer) -> bool:
        """Return whether the backward pass that is running is to give parameters a gradient.

        ``torch.autograd.grad(loss, x)`` and ``backward(inputs=[x])`` ask for gradients of inputs
        alone: such a pass trains nothing. 1 us. Raises RuntimeError for ``torch.autograd.grad`` of
        parameters.
        """
        nodes = []
        for parameter in self._wholes or layer.parameters.values():
            if parameter.requires_grad:
                if parameter not in self._nodes:
                    self._nodes[parameter] = get_gradient_edge(parameter).node
                nodes.append(self._nodes[parameter])
        try:
            wanted = set(map(torch._C._will_engine_execute_node, nodes))
        except RuntimeError as error:
            raise RuntimeError(
                f"{layer.describe()}: torch.autograd.grad() asks for gradients of its parameters, "
                "which private training does not hand out without noise; call backward() and step()"
            ) from error
        if len(wanted) > 1:
            raise RuntimeError(
                f"{layer.describe()}: backward(inputs=...) asks for gradients of some of its "
                "parameters only; name all of a layer's, or freeze the others"
            )
        return wanted != {False}

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


def _backward_task() -> int:
    """Return the number of the backward pass that is running, or -1."""
    return torch._C._current_graph_task_id()
