"""What the first call of a model must show: every layer sees samples, and samples stay apart.

The engine takes index i of a layer's first axis for sample i, and clips what belongs to it. That
holds only if sample i's outputs depend on sample i alone. The lengths of a batch cannot show it, so
the model is tried out once, before its first step, for each form of its arguments:

1. It runs without capture. ``Provenance`` tells which indices of embeddings are positions, made
   from lengths and buffers, and not tokens of the samples.
2. It runs with capture, and the outputs of one half of the samples are differentiated. Errors in
   every layer, and gradients of the inputs, must be exactly zero for the other half.
3. It runs with the other half replaced by samples of the first. What layers see of the first half
   must stay the same.

Half of the samples are those with an even index, so that a shift or a sorted order is noticed. The
runs use the batch of the call, its random numbers and nothing else; buffers and random state are
put back. Whether a model is refused is a matter of the model, except where a model mixes samples
only for some values. What cannot be seen from the model (a loss outside of it that mixes samples,
hooks on gradients) is listed in ``make_private``.

Cost: two training passes and one evaluation, once for each form of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
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


@dataclass(frozen=True)
class Arguments:
    """What the model is called with: leaves of a tree, and how many samples they hold."""

    leaves: list[Any]
    structure: Any
    batch: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Arguments:
        """Take arguments apart."""
        leaves, structure = tree_flatten((args, kwargs))
        return cls(leaves, structure, batch)

    def chosen(self, rows: Tensor) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Return arguments with samples ``rows``, and the floating tensors among them.

        rows: int64 ``[B]``. All tensors are copies, which a forward pass may change.
        """
        copies: list[Any] = []
        inputs = []
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                leaf = leaf.detach()
                has_samples = leaf.dim() > 0 and leaf.shape[0] == self.batch
                leaf = leaf[rows.to(leaf.device)] if has_samples else leaf.clone()
                if has_samples and leaf.is_floating_point() and torch.is_grad_enabled():
                    inputs.append(leaf.requires_grad_())
            copies.append(leaf)
        args, kwargs = tree_unflatten(copies, self.structure)
        return args, kwargs, inputs


@dataclass
class Trace:
    """What one run showed: row sums of every tensor that layers delivered.

    rows: the samples whose outputs are differentiated. digests: by layer and delivery.
    others: layers with errors of samples whose outputs are not, in the order of delivery.
    """

    rows: Tensor
    digests: dict[tuple[Layer, int], list[Tensor]] = field(default_factory=dict)
    others: list[Layer] = field(default_factory=list)

    def deliver(self, layer: Layer, captured: Captured) -> None:
        """Note one use of ``layer``."""
        count = sum(known is layer for known, _ in self.digests)
        self.digests[layer, count] = [_digest(x, self.rows) for x in captured]
        if layer not in self.others and any(map(self._reaches_others, layer.errors(captured))):
            self.others.append(layer)

    def _reaches_others(self, errors: Tensor) -> bool:
        """Return whether a row that is not differentiated has an error.

        One that is not finite says nothing: zero times an infinite activation is not a number.
        """
        rest = torch.ones(errors.shape[0], dtype=torch.bool, device=errors.device)
        rest[self.rows.to(errors.device)] = False
        others = errors[rest]
        return bool(((others != 0) & others.isfinite()).any())

    def differs(self, other: Trace) -> Layer | None:
        """Return a layer that saw something else of the same samples; the first in the model."""
        found = None
        for key, digests in self.digests.items():
            pairs = zip(digests, other.digests.get(key, []), strict=False)
            if any(not _same(a, b) for a, b in pairs):
                found = key[0]  # deliveries come last layer first
        return found


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
    batch = arguments.batch
    everyone = torch.arange(batch)
    half = everyone[::2]
    with state.kept():
        plain = look_up(model, forward, capture, state, arguments)
        replaced = torch.where(everyone % 2 == 0, everyone, (everyone + 1) % batch)
        trial = _Trial(model, forward, capture, arguments, half, plain)
        while True:
            first = trial.run(everyone)
            unsure = [x for x in first.others if x.settle_layout()]
            if not unsure:
                break
        if first.others:
            raise _mixes(f"after {first.others[0].describe()}")
        pairs = [(first, trial.run(replaced))]
        if trial.has_scalars:
            pairs += [(trial.run(everyone, True), trial.run(replaced, True))]
        for one, other in pairs:
            if (layer := one.differs(other)) is not None:
                raise _mixes(f"before {layer.describe()}, or in its loss")


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

        with capture.noting(note), provenance:
            return floating(tree_leaves(forward(*args, **kwargs)))


@dataclass
class _Trial:
    """Runs of the model with capture, in which the outputs of some samples are differentiated."""

    model: nn.Module
    forward: Callable[..., Any]
    capture: Capture
    arguments: Arguments
    half: Tensor
    plain: list[Tensor]
    has_scalars: bool = False

    def run(self, rows: Tensor, scalars: bool = False) -> Trace:
        """Return what layers deliver for samples ``rows`` when half of them are differentiated.

        scalars: differentiate outputs without an axis of samples (a loss) instead.
        """
        trace = Trace(self.half)
        batch = self.arguments.batch

        def pass_complete(current: Pass) -> None:
            for layer, uses in current.uses.items():
                for use in uses:
                    trace.deliver(layer, use)

        with (
            torch.enable_grad(),
            _random_state_kept(self.model),
            self.capture.redirected(lambda _, *delivered: trace.deliver(*delivered), pass_complete),
        ):
            args, kwargs, inputs = self.arguments.chosen(rows)
            with self.capture.one_pass(batch):
                outputs = floating(tree_leaves(self.forward(*args, **kwargs)))
            self._check_outputs(outputs)
            mine = [y for y in outputs if y.requires_grad and (y.dim() == 0) == scalars]
            if not scalars:
                self.has_scalars |= any(y.dim() == 0 and y.requires_grad for y in outputs)
                mine = [y[self.half.to(y.device)] for y in mine if y.shape[0] == batch]
            if mine:
                torch.autograd.backward(mine, [_weights(y) for y in mine])
        if not scalars:
            self._check_inputs(inputs)
        return trace

    def _check_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Raise Unsupported if capture changes what the model returns."""
        if [y.shape for y in outputs] != [y.shape for y in self.plain]:
            raise Unsupported(
                "positions of an embedding, [T] or [1, T], change the shape of the model's output "
                "when they are looked up for each sample; pass them as [samples, T]"
            )

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        for x in inputs:
            if x.grad is not None and Trace(self.half)._reaches_others(x.grad):
                raise _mixes("before its first trained layer")


def floating(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that can have errors."""
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


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
    flat = x.detach()[rows.to(x.device)].flatten(1) if x.dim() > 1 else x[rows].unsqueeze(1)
    flat = flat.double()
    length = flat.shape[1]
    weights = torch.sin(torch.arange(length, device=x.device, dtype=torch.float64) + 1)
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    tolerance = flat.norm(dim=1) * eps**0.5
    return torch.stack([flat @ weights, tolerance, torch.full_like(tolerance, length)], 1)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two digests are of the same values, or cannot be compared."""
    if not torch.equal(a[:, 2], b[:, 2]):
        return True  # other lengths: a model that cuts the batch to its longest sample
    close = (a[:, 0] - b[:, 0]).abs() <= torch.maximum(a[:, 1], b[:, 1])
    return bool((close | ~(a.isfinite() & b.isfinite()).all(1)).all())


def _random_state_kept(model: nn.Module) -> Any:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(list(devices))
