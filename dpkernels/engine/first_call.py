"""What the first call of a model must show: every layer sees samples, and samples stay apart.

The engine takes index i of a layer's first axis for sample i, and clips what belongs to it. That
holds only if sample i's outputs depend on sample i alone. The lengths of a batch cannot show it, so
the model is tried out once, before its first step, for each form of its arguments:

1. It runs without capture. ``Provenance`` tells which indices of embeddings are positions, made
   from lengths and buffers, and not tokens of the samples.
2. It runs with capture, and the outputs of one half of the samples are differentiated. Errors in
   every layer, and gradients of the inputs, must be exactly zero for the other half.
3. It runs with the other half replaced by samples of this one; and, unless it draws random numbers,
   which belong to places, on the batch in reverse and on this half alone. What layers see of a
   sample, and what the model returns for it, must stay the same.

Both halves take their turn. The runs use the batch of the call and nothing else; buffers and random
numbers are put back. Whether a model is refused is a matter of the model, except where a model
mixes samples for some values only. What cannot be seen from the model (a loss outside of it that
mixes samples, hooks on gradients) is listed in ``make_private``.

Cost: seven training passes and an evaluation, once for each form of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpkernels.engine.layers.layer import Layer, Unsupported
from dpkernels.engine.provenance import Provenance

if TYPE_CHECKING:
    from dpkernels.engine.capture import Capture, Captured, Pass
    from dpkernels.engine.state import State

_WAY_OUT = (
    "let each sample's output depend on that sample alone, with samples as the first axis of every "
    "trained layer (GroupNorm or LayerNorm instead of batch statistics, batch_first=True)"
)


# Of the tolerance for the same arithmetic: 0.005 of a row in float32.
_ELSEWHERE = 16.0
Digests = dict[tuple[Layer, int], list[Tensor]]


@dataclass(frozen=True)
class Arguments:
    """What the model is called with: leaves of a tree, and how many samples they hold."""

    leaves: list[Any]
    structure: Any
    batch: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Arguments:
        """Take arguments apart."""
        leaves, structure = tree_flatten((args, kwargs), is_leaf=_is_packed)
        return cls(leaves, structure, batch)

    def chosen(
        self, rows: Tensor, follow: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Return arguments with samples ``rows``, and the floating tensors among them.

        rows: int64 ``[B]``. All tensors are copies, which a forward pass may change.
        follow: whether the floating ones are to get gradients.
        """
        copies: list[Any] = []
        inputs = []
        for leaf in self.leaves:
            if _is_packed(leaf):
                leaf = _of_samples(leaf, rows)
            elif isinstance(leaf, Tensor) and leaf.shape[:1] != (self.batch,):
                leaf = leaf.detach().clone()
            elif isinstance(leaf, Tensor):
                leaf = _of_samples(leaf, rows)
                if follow and leaf.is_floating_point() and torch.is_grad_enabled():
                    inputs.append(leaf.requires_grad_())
                    leaf = leaf.clone()  # a leaf must not be changed in place
            copies.append(leaf)
        args, kwargs = tree_unflatten(copies, self.structure)
        return args, kwargs, inputs


@dataclass
class Trace:
    """What one run showed of some samples.

    rows: where these samples were. inputs, errors: digests of what layers delivered, by layer and
    delivery. outputs: digests of what the model returned for them.
    others: layers with errors of other samples, in the order of delivery.
    """

    rows: Tensor
    inputs: Digests = field(default_factory=dict)
    errors: Digests = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    others: list[Layer] = field(default_factory=list)

    def deliver(self, layer: Layer, captured: Captured) -> None:
        """Note one use of ``layer``."""
        use = layer, sum(known is layer for known, _ in self.errors)
        errors = layer.errors(captured)
        rest = [x for x in captured if not any(x is error for error in errors)]
        self.inputs[use] = [_digest(x, self.rows) for x in rest]
        self.errors[use] = [_digest(x, self.rows) for x in errors]
        if layer not in self.others and any(map(self.reaches_others, errors)):
            self.others.append(layer)

    def reaches_others(self, errors: Tensor) -> bool:
        """Return whether a row that is not differentiated has an error.

        One that is not finite says nothing: zero times an infinite activation is not a number.
        """
        rest = torch.ones(errors.shape[0], dtype=torch.bool, device=errors.device)
        rest[self.rows.to(errors.device)] = False
        others = errors[rest]
        return bool(((others != 0) & others.isfinite()).any())

    def differs(self, other: Trace, elsewhere: bool = False) -> str | None:
        """Return where another run showed something else of the same samples, if so.

        elsewhere: samples were in other places, where products round differently. Errors that
        cancel are nothing but rounding, so those are not compared then.
        """
        tolerance = _ELSEWHERE if elsewhere else 1.0
        where = None
        if not _all_same(self.outputs, other.outputs, tolerance):
            where = "after its last trained layer"
        for use, inputs in self.inputs.items():
            same = _all_same(inputs, other.inputs.get(use, []), tolerance)
            if not elsewhere:
                same &= _all_same(self.errors[use], other.errors.get(use, []), tolerance)
            if not same:
                where = f"before {use[0].describe()}"  # deliveries come last layer first
        return where


def examine(
    model: nn.Module,
    forward: Callable[..., Any],
    capture: Capture,
    state: State,
    arguments: Arguments,
) -> None:
    """Try the model out on ``arguments``; raise Unsupported where samples do not stay apart.

    forward: the model's own forward pass, in which layers deliver to ``capture``.
    """
    trial = _Trial(model, forward, capture, arguments)
    try:
        trial.plain = look_up(model, forward, capture, state, arguments)
    except Unsupported:
        raise
    except Exception:
        # Layers in private training have more to say about wrong inputs than torch has.
        trial.run(trial.everyone, trial.everyone)
        raise
    with state.kept():
        for half in trial.halves():
            _examine(trial, half)


def _examine(trial: _Trial, half: Tensor) -> None:
    """Raise Unsupported if samples ``half`` influence the others, or the other way round."""
    everyone = trial.everyone
    own = trial.run(everyone, half)
    while sum(layer.settle_layout() for layer in own.others):
        own = trial.run(everyone, half)
    if own.others:
        raise _mixes(f"after {own.others[0].describe()}")
    # Each by the one before it, so that samples that come sorted by length stay sorted.
    replaced = half[(torch.searchsorted(half, everyone, right=True) - 1).clamp(min=0)]
    where = own.differs(trial.run(replaced, half))
    if where is not None and own.differs(trial.run(everyone, half)) is not None:
        where = None  # it differs from itself: sums in any order, on a GPU
    if where is None and not trial.drawn:
        reverse = everyone.flip(0), len(everyone) - 1 - half
        alone = half, torch.arange(len(half))
        where = trial.differs_elsewhere(own, *reverse) or trial.differs_elsewhere(own, *alone)
    if where is None and trial.has_common:
        # A layer that cannot tell samples apart in such an output refuses it when it is used.
        with suppress(RuntimeError):
            whole, other = (trial.run(rows, half, common=True) for rows in (everyone, replaced))
            where = whole.differs(other)
    if where is not None:
        raise _mixes(where)


def look_up(
    model: nn.Module,
    forward: Callable[..., Any],
    capture: Capture,
    state: State,
    arguments: Arguments,
) -> list[Tensor]:
    """Run the model as it is, tell layers whose input they are given, and return its outputs."""
    known = [*model.parameters(), *model.buffers()]
    with torch.no_grad(), _random_state_kept(model):
        args, kwargs, _ = arguments.chosen(torch.arange(arguments.batch))
        provenance = Provenance(known)

        def note(layer: Layer, given: Sequence[Any]) -> None:
            tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
            if tensors:
                shared = provenance.is_shared(tensors[0])
                layer.note_input(tensors[0].shape, shared, arguments.batch)

        with state.kept(), capture.noting(note), provenance:
            return outputs_of(model, forward(*args, **kwargs))


@dataclass
class _Trial:
    """Runs of the model with capture, in which the outputs of some samples are differentiated.

    plain: what the model returns without capture. has_common: whether it returns something whose
    first axis is not that of the samples, a loss say. drawn: whether it drew random numbers.
    follow: whether gradients of the inputs are looked at.
    """

    model: nn.Module
    forward: Callable[..., Any]
    capture: Capture
    arguments: Arguments
    plain: list[Tensor] | None = None
    has_common: bool = False
    drawn: bool = False
    follow: bool = True

    @property
    def everyone(self) -> Tensor:
        """All samples, in order."""
        return torch.arange(self.arguments.batch)

    def halves(self) -> list[Tensor]:
        """Return two halves without an order that a model could have, or one sample alone."""
        batch = self.arguments.batch
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(batch))
        middle = (batch + 1) // 2
        return [half.sort().values for half in (order[:middle], order[middle:]) if len(half)]

    def run(self, samples: Tensor, rows: Tensor, common: bool = False) -> Trace:
        """Return what ``_run`` does, without gradients of inputs if the model asks for them itself.

        It may set ``requires_grad`` on what it makes of its inputs (wav2vec 2.0), which torch
        allows only for tensors without a history.
        """
        try:
            return self._run(samples, rows, common)
        except RuntimeError as error:
            if not self.follow or "requires_grad flags" not in str(error):
                raise
        self.follow = False
        return self._run(samples, rows, common)

    def differs_elsewhere(self, own: Trace, samples: Tensor, rows: Tensor) -> str | None:
        """Return where ``rows`` of ``samples`` show something else than they did in place."""
        try:
            other = self.run(samples, rows)
        except Unsupported:
            raise
        except Exception:
            return None  # a model that wants its samples in order, or so many of them
        if other.others:
            return f"after {other.others[0].describe()}"
        return own.differs(other, elsewhere=True)

    def _run(self, samples: Tensor, rows: Tensor, common: bool) -> Trace:
        """Return what layers deliver when the outputs ``rows`` are differentiated.

        samples: of the batch, which go in in this order. common: differentiate outputs that samples
        have in common instead, as a whole.
        """
        trace = Trace(rows)

        def pass_complete(current: Pass) -> None:
            for layer, uses in current.uses.items():
                for use in uses:
                    trace.deliver(layer, use)

        with (
            torch.enable_grad(),
            _random_state_kept(self.model),
            self.capture.redirected(lambda _, *delivered: trace.deliver(*delivered), pass_complete),
        ):
            args, kwargs, inputs = self.arguments.chosen(samples, self.follow)
            before = torch.get_rng_state()
            with self.capture.one_pass(len(samples)):
                outputs = outputs_of(self.model, self.forward(*args, **kwargs))
            self.drawn |= not torch.equal(torch.get_rng_state(), before)
            if torch.equal(samples, self.everyone):
                self._check_outputs(outputs)
            size = (len(samples),)
            mine = [y[rows.to(y.device)] for y in outputs if y.shape[:1] == size]
            others = [y for y in outputs if y.requires_grad and y.shape[:1] != size]
            self.has_common |= len(others) > 0
            if not common:
                trace.outputs = [_digest(y, torch.arange(len(y))) for y in mine]
            if given := others if common else [y for y in mine if y.requires_grad]:
                torch.autograd.backward(given, [_weights(y) for y in given])
        if not common and any(x.grad is not None and trace.reaches_others(x.grad) for x in inputs):
            raise _mixes("before its first trained layer")
        return trace

    def _check_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Raise Unsupported if capture changes what the model returns."""
        if self.plain is not None and [y.shape for y in outputs] != [y.shape for y in self.plain]:
            raise Unsupported(
                "positions of an embedding, [T] or [1, T], change the shape of the model's output "
                "when they are looked up for each sample; pass them as [samples, T]"
            )


def outputs_of(model: nn.Module, output: Any) -> list[Tensor]:
    """Return the floating tensors that the model returns; sequences as ``[B, T, ...]``.

    Raises Unsupported for an object inside of which tensors cannot be found.
    """
    leaves = tree_leaves(output, is_leaf=_is_packed)
    leaves = [x for leaf in leaves for x in (_fields(leaf) if is_dataclass(leaf) else [leaf])]
    leaves = [pad_packed_sequence(x, True)[0] if _is_packed(x) else x for x in leaves]
    if leaves and not any(isinstance(x, Tensor) for x in leaves):
        raise Unsupported(
            f"{type(model).__name__} returns a {type(leaves[0]).__name__}, inside of which tensors "
            "cannot be followed; return tensors, tuples, lists, dicts or dataclasses"
        )
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _fields(leaf: Any) -> list[Any]:
    return tree_leaves([getattr(leaf, field.name) for field in fields(leaf)])


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _of_samples(leaf: Any, rows: Tensor) -> Any:
    """Return some samples of a batch: a tensor ``[B, ...]``, or packed sequences."""
    if isinstance(leaf, Tensor):
        return leaf.detach()[rows.to(leaf.device)]
    padded, lengths = pad_packed_sequence(leaf, batch_first=True)
    own = padded.detach()[rows.to(padded.device)], lengths[rows]
    return pack_padded_sequence(*own, batch_first=True, enforce_sorted=False)


def _mixes(where: str) -> Unsupported:
    return Unsupported(
        f"the model mixes samples {where}: the output of one sample depends on another, or the "
        "first axis is not that of the samples, so that clipping would not bound what one sample "
        f"does; {_WAY_OUT}"
    )


def _weights(y: Tensor) -> Tensor:
    """Return what to multiply outputs by before they are added: no two the same, none of them 0."""
    places = torch.arange(y.numel(), device=y.device, dtype=torch.float64)
    return (1 + 0.5 * torch.sin(places + 1)).to(y.dtype).view(y.shape)


def _digest(x: Tensor, rows: Tensor) -> Tensor:
    """Return of each of ``rows`` a weighted sum, its tolerance, and its length: ``[rows, 3]``.

    Equal arithmetic on equal rows gives equal bits on a CPU. On a GPU, sums in any order differ by
    roundings, which stay below the root of eps.
    """
    chosen = x.detach()[rows.to(x.device)].double()
    flat = chosen.flatten(1) if chosen.dim() > 1 else chosen.unsqueeze(1)
    length = flat.shape[1]
    weights = torch.sin(torch.arange(length, device=x.device, dtype=torch.float64) + 1)
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    tolerance = flat.norm(dim=1) * eps**0.5
    return torch.stack([flat @ weights, tolerance, torch.full_like(tolerance, length)], 1)


def _all_same(these: Sequence[Tensor], those: Sequence[Tensor], tolerance: float) -> bool:
    pairs = zip(these, those, strict=False)
    return all(_same(a, b, tolerance) for a, b in pairs)


def _same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two digests are of the same values, or cannot be compared."""
    if not torch.equal(a[:, 2], b[:, 2]):
        return True  # other lengths: a model that cuts the batch to its longest sample
    close = (a[:, 0] - b[:, 0]).abs() <= tolerance * torch.maximum(a[:, 1], b[:, 1])
    return bool((close | ~(a.isfinite() & b.isfinite()).all(1)).all())


def _random_state_kept(model: nn.Module) -> Any:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(list(devices))
