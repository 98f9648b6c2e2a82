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

Cost: about seven training passes and an evaluation, once for each form of the arguments; twelve
passes for a model that draws random numbers, which is tried out with three seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpkernels.engine.arguments import Arguments, outputs_of
from dpkernels.engine.layers.layer import Layer, Unsupported
from dpkernels.engine.provenance import Provenance

if TYPE_CHECKING:
    from dpkernels.engine.capture import Capture, Captured, Pass
    from dpkernels.engine.state import State

_WAY_OUT = (
    "let each sample's output depend on that sample alone, with samples as the first axis of every "
    "trained layer (GroupNorm or LayerNorm instead of batch statistics, batch_first=True)"
)


# Where rows are elsewhere, products round differently. They may differ by so many times the
# tolerance for the same arithmetic, 0.005 of a row in float32; and by so many roundings of the
# largest product that there is, which may have cancelled.
_ELSEWHERE, _ROUNDINGS = 16.0, 100.0
# A norm divides by sqrt(eps) what has no variance: rows of nothing but rounding, which may come to
# so many roundings of that product, divided likewise.
_MAGNIFIED = 4.0
# Random numbers that a model which draws some is tried out with: one order of a small batch may
# happen to leave everything in its place.
_SEEDS = (0, 1, 2)
Digests = dict[tuple[Layer, int], list[Tensor]]


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
        scale = (self._largest(), self._magnified()) if elsewhere else None
        where = None
        if not _all_same(self.outputs, other.outputs, scale):
            where = "after its last trained layer"
        for use, inputs in self.inputs.items():
            same = _all_same(inputs, other.inputs.get(use, []), scale)
            if not elsewhere:
                same &= _all_same(self.errors[use], other.errors.get(use, []), scale)
            if not same:
                where = f"before {use[0].describe()}"  # deliveries come last layer first
        return where

    def _largest(self) -> float:
        """Return the largest product of a row and a layer's weights, which may have cancelled."""
        found = [_longest(self.outputs)]
        for (layer, _), inputs in self.inputs.items():
            weights = max(float(p.detach().norm()) for p in layer.parameters.values())
            found.append(_longest(inputs) * max(1.0, weights))
        return max(found)

    def _magnified(self) -> float:
        """Return how many times as large a norm of the model may make what it is given."""
        norms = (getattr(layer.module, "eps", None) for layer, _ in self.inputs)
        return max((eps**-0.5 for eps in norms if isinstance(eps, float) and eps > 0), default=1.0)


def examine(
    model: nn.Module,
    forward: Callable[..., Any],
    capture: Capture,
    state: State,
    arguments: Arguments,
) -> bool:
    """Try the model out on ``arguments``; raise Unsupported where samples do not stay apart.

    forward: the model's own forward pass, in which layers deliver to ``capture``.

    Returns whether that settles it: where all samples are equal, another batch must show.
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
        for seed in _SEEDS:
            trial.seed = seed
            for half in trial.halves():
                _examine(trial, half)
            if not trial.drawn:
                break
    return arguments.differ


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
    if where is not None and trial.on_gpu and own.differs(trial.run(everyone, half)) is not None:
        where = None  # it differs from itself: a GPU adds up in any order
    if where is None and not trial.drawn and trial.arguments.can_move:
        reverse = everyone.flip(0), len(everyone) - 1 - half
        alone = half, torch.arange(len(half))
        where = trial.differs_elsewhere(own, *reverse) or trial.differs_elsewhere(own, *alone)
    if where is None and trial.has_common:
        # A layer that cannot tell samples apart in such an output refuses it when it is used.
        try:
            whole, other = (trial.run(rows, half, common=True) for rows in (everyone, replaced))
            where = whole.differs(other)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            pass
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
    follow: whether gradients of the inputs are looked at. seed: of the random numbers.
    """

    model: nn.Module
    forward: Callable[..., Any]
    capture: Capture
    arguments: Arguments
    plain: list[Tensor] | None = None
    has_common: bool = False
    drawn: bool = False
    follow: bool = True
    seed: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on one."""
        return any(parameter.is_cuda for parameter in self.model.parameters())

    @property
    def everyone(self) -> Tensor:
        """All samples, in order."""
        return torch.arange(self.arguments.batch)

    def halves(self) -> list[Tensor]:
        """Return two random halves; a batch of one gives itself."""
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
        except (Unsupported, torch.OutOfMemoryError):
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
            _random_state_kept(self.model, self.seed),
            self.capture.redirected(lambda _, *delivered: trace.deliver(*delivered), pass_complete),
        ):
            args, kwargs, inputs = self.arguments.chosen(samples, self.follow)
            before = _random_numbers()
            with self.capture.one_pass(len(samples)):
                outputs = outputs_of(self.model, self.forward(*args, **kwargs))
            self.drawn |= _random_numbers() != before
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


def _mixes(where: str) -> Unsupported:
    return Unsupported(
        f"the model mixes samples {where}: the output of one sample depends on another, or the "
        "first axis is not that of the samples, so that clipping would not bound what one sample "
        f"does; {_WAY_OUT}; a mask [T, T] that the batch is as long as by chance is taken for the "
        "samples': pass it as [1, T, T]"
    )


def _weights(y: Tensor) -> Tensor:
    """Return what to multiply outputs by before they are added: no two the same, none of them 0."""
    places = torch.arange(y.numel(), device=y.device, dtype=torch.float64)
    return (1 + 0.5 * torch.sin(places + 1)).to(y.dtype).view(y.shape)


def _longest(digests: Sequence[Tensor]) -> float:
    norms = [x[:, 1][x[:, 1].isfinite()] for x in digests]
    return max((float(x.max()) for x in norms if len(x)), default=0.0)


def _digest(x: Tensor, rows: Tensor) -> Tensor:
    """Return of each of ``rows`` a weighted sum, norm, eps and length: float64 ``[rows, 4]``."""
    chosen = x.detach()[rows.to(x.device)].double()
    flat = chosen.flatten(1) if chosen.dim() > 1 else chosen.unsqueeze(1)
    length = flat.shape[1]
    weights = torch.sin(torch.arange(length, device=x.device, dtype=torch.float64) + 1)
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    norms = flat.norm(dim=1)
    constants = [torch.full_like(norms, x) for x in (eps, length)]
    return torch.stack([flat @ weights, norms, *constants], 1)


def _all_same(
    these: Sequence[Tensor], those: Sequence[Tensor], scale: tuple[float, float] | None
) -> bool:
    pairs = zip(these, those, strict=False)
    return all(_same(a, b, scale) for a, b in pairs)


def _same(a: Tensor, b: Tensor, scale: tuple[float, float] | None) -> bool:
    """Return whether two digests are of the same values, or cannot be compared.

    Equal arithmetic on equal rows gives equal bits on a CPU. On a GPU, sums in any order differ by
    roundings, which stay below the root of eps.

    scale: of the forward pass, and how much norms magnify, if rows are elsewhere.
    """
    if not torch.equal(a[:, 3], b[:, 3]):
        return True  # other lengths: a model that cuts the batch to its longest sample
    eps = a[:, 2]
    norms, difference = torch.maximum(a[:, 1], b[:, 1]), (a[:, 0] - b[:, 0]).abs()
    tolerance = eps.sqrt() * norms
    close = difference <= tolerance
    if scale is not None:
        largest, magnified = scale
        close = difference <= torch.maximum(_ELSEWHERE * tolerance, _ROUNDINGS * eps * largest)
        close |= norms <= _MAGNIFIED * eps * largest * magnified
    return bool((close | ~(a.isfinite() & b.isfinite()).all(1)).all())


def _random_numbers() -> tuple[Any, ...]:
    """Return numbers that are others once a generator has been used."""
    with torch.random.fork_rng([]):
        drawn = torch.rand(4).tolist()
    of_numpy: Any = numpy.random.get_state()
    return (*drawn, of_numpy[2], int(of_numpy[1].sum()), random.getstate())


@contextmanager
def _random_state_kept(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Begin with the same random numbers, and leave all generators as they were."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(list(devices)):
            torch.manual_seed(seed)
            numpy.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
