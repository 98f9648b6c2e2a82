"""The private query of FedFisher: sums over records of clipped Kronecker factors, or diagonals.

    q(D) = sum over records r of [f_r1 F_r1 / c_1, ..., f_rP F_rP / c_P, w],
    f_rp = min(1, c_p / s_rp)

F_rp is part p of what record r alone says, as a vector of the same norm: sum_t a_t a_t^T of a
module, the mean over its positions of d_t d_t^T, or, of ``diagonal``, the squares of the record's
gradient. s_rp >= |F_rp|: the trace of a factor, which is >= its Frobenius norm and costs a sum of
squares; the norm itself of a diagonal. c_p are public clips, w the weight of the count.

One record more or less moves q by at most sqrt(P + w^2), whatever it and the others are. What
record r adds is made of r alone: the errors at the outputs are (diag(sqrt p) - p sqrt(p)^T) v with
p the model's own probabilities, so that no label is used, and signs v that follow from the client's
seed and from *which* record it is, not from how many others there are. Passes, products and sums
are float64. (Whoever knows the seed, and every other record, learns no more.)

That holds for records that are not crafted against float64. A library may round a row of a matrix
product by where the row is in its batch, so a record whose products cancel down to their rounding
(terms of 1e16 that add up to 0) may add something else when another record goes: each such record
moves q by up to twice the bound more. ``make_private`` has the same limit, in float32.

A record with anything that is not finite, in any part, adds exactly zero, its count included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from dpkernels.engine.capture import Captured, Pass
from dpkernels.engine.layers.conv import ConvLayer
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.linear import LinearLayer
from dpkernels.engine.probing import probing, undisturbed
from dpkernels.federated.fisher_vectors import FisherLayout, Part
from dpkernels.federated.triangles import packed
from dpkernels.fisher.errors import sign_errors

# Factors are rounded down by more than what a float64 sum of 10^6 squares can err by.
_DOWN = 1 - 2.0**-30
# Clips are at least this: squares of float64 numbers below 1e-162 vanish, so that a size below it
# may be under-estimated, and 1 over a subnormal clip is not a number to multiply by.
_LEAST_CLIP = 1e-100
# So many elements of one layer's rows at a time: 32 MB of float64.
_ELEMENTS = 1 << 22
_MOST_RECORDS = 512
_TRIED = 8


class Contribution(Protocol):
    """One part of what each record of a batch adds."""

    @property
    def elements(self) -> int:
        """How many numbers are kept of it."""
        ...

    @property
    def sizes(self) -> Tensor:
        """Bounds of its norms, ``[B]``; not finite where a record is not."""
        ...

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return ``sum_b factors[b] F_b`` as a vector; a record of factor 0 adds exactly zero."""
        ...


@dataclass(frozen=True)
class Products:
    """``scale * sum_t x_t x_t^T`` of rows ``[B, T, n]``."""

    rows: Tensor
    scale: float

    @property
    def elements(self) -> int:
        """Those of the rows."""
        return self.rows.numel()

    @property
    def sizes(self) -> Tensor:
        """The traces."""
        return self.rows.square().sum((1, 2)) * self.scale

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the packed triangle of the sum."""
        kept = torch.where(factors[:, None, None] > 0, self.rows, 0.0)
        rows = (kept * (factors * self.scale).sqrt()[:, None, None]).flatten(0, 1)
        return packed((rows.mT @ rows)[None])[0]


@dataclass(frozen=True)
class Squares:
    """Squares of gradients ``[B, n]``."""

    gradients: Tensor

    @property
    def elements(self) -> int:
        """Those of the gradients."""
        return self.gradients.numel()

    @property
    def sizes(self) -> Tensor:
        """The norms."""
        norms: Tensor = self.gradients.square().norm(dim=1)
        return norms

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum of the squares."""
        kept = torch.where(factors[:, None] > 0, self.gradients, 0.0)
        return factors @ kept.square()


def each_batch(
    model: nn.Module,
    x: Tensor,
    ids: Tensor,
    layout: FisherLayout,
    seed: int,
    at_a_time: int,
    take: Callable[[list[Contribution]], None],
) -> None:
    """Give ``take`` what records add, some of them at a time, a contribution for each part.

    model: float64, classifying: logits ``[B, C]``. x: ``[N, ...]``. ids: int64 ``[N]``: which
    records they are. One forward and one backward pass; at most ``at_a_time`` records in each.

    Raises ValueError for a module that is called more than once, or not at all.
    """
    found: dict[tuple[str, str], Contribution] = {}

    def layer_complete(current: Pass, layer: Layer, captured: Captured) -> None:
        found.update(_of_layer(layer, tuple(x.detach() for x in captured), layout))

    def pass_complete(current: Pass) -> None:
        for layer in current.uses:
            raise ValueError(
                f"{layer.describe()}: it is used more than once, or shares a parameter; its "
                "factors are not clipped record by record; take factors 'public' or 'probes'"
            )

    with probing(model, layer_complete, pass_complete), undisturbed(model):
        # The engine tries a model out on what it sees first, and raises for what it finds: that is
        # no record. One sample is another form to it than several.
        forms = {len(rows) > 1 for rows in torch.arange(len(x)).split(at_a_time) if len(rows)}
        for several in forms:
            model(_noise(_TRIED if several else 1, x.shape[1:]))
        for rows in torch.arange(len(x)).split(at_a_time):
            if len(rows):
                found.clear()
                logits = model(x[rows].double())
                signs = record_signs(ids[rows], logits.shape[1], seed)
                logits.backward(sign_errors(logits.detach().log_softmax(1), signs))
                take([_part_of(found, part) for part in layout.parts])


def _part_of(found: dict[tuple[str, str], Contribution], part: Part) -> Contribution:
    if (part.module, part.side) not in found:
        raise ValueError(
            f"FedFisher: no record reached the module {part.module!r}; freeze it, or take factors "
            "'none'"
        )
    return found[part.module, part.side]


def _of_layer(
    layer: Layer, captured: Captured, layout: FisherLayout
) -> dict[tuple[str, str], Contribution]:
    """Return the parts of one layer from its activations and errors."""
    if layout.kind == "diagonal":
        return {(layer.name, "diagonal"): Squares(_gradients(layer, captured))}
    a, d = _positions(layer, captured)
    if layer.trains("bias"):
        a = pad(a, (0, 1), value=1.0)
    return {(layer.name, "a"): Products(a, 1.0), (layer.name, "g"): Products(d, 1 / d.shape[1])}


def _positions(layer: Layer, captured: Captured) -> tuple[Tensor, Tensor]:
    """Return activations ``[B, T, I]`` and errors ``[B, T, O]``."""
    inputs, errors = captured
    if isinstance(layer, ConvLayer):
        geometry = {k: v for k, v in layer.geometry().items() if k != "groups"}
        return unfold(inputs, **geometry).mT, errors.flatten(2).mT
    return inputs.unsqueeze(1).flatten(1, -2), errors.unsqueeze(1).flatten(1, -2)


def _gradients(layer: Layer, captured: Captured) -> Tensor:
    """Return single records' gradients of all parameters, ``[B, n]``."""
    assert isinstance(layer, LinearLayer | ConvLayer)
    return torch.cat([g.flatten(1) for g in layer.gradients(captured)], 1)


def _noise(count: int, shape: Sequence[int]) -> Tensor:
    """Return the same synthetic inputs ``[count, *shape]`` every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)


def check_modules(model: nn.Module, layout: FisherLayout) -> None:
    """Raise ValueError for a part of a module whose records' factors are not known apart."""
    for part in layout.parts:
        module = model.get_submodule(part.module)
        conv = isinstance(module, nn.Conv2d) and module.groups == 1
        if not conv and not isinstance(module, nn.Linear):
            raise ValueError(
                f"FedFisher: factors of records are clipped in Linear and Conv2d without groups, "
                f"got {part.module!r}, {type(module).__name__}; freeze it, or take factors "
                "'public', 'probes' or 'none'"
            )


def at_a_time(model: nn.Module, x: Tensor, layout: FisherLayout) -> int:
    """Return how many records' rows fit into memory at a time, from the shapes of one."""
    sizes: list[int] = []

    def note(batch: list[Contribution]) -> None:
        sizes.extend(part.elements for part in batch)

    each_batch(model, torch.zeros_like(x[:1]), torch.zeros(1).long(), layout, 0, 1, note)
    return max(1, min(_MOST_RECORDS, _ELEMENTS // max(sizes, default=1)))


def mean_sizes(model: nn.Module, x: Tensor, layout: FisherLayout, most: int) -> list[float]:
    """Return the mean size of each part over public inputs x; 1 where it is zero.

    Clips that are multiples of these are public: nothing but x and the model is looked at.
    most: records at a time.
    """
    totals = torch.zeros(len(layout.parts), dtype=torch.float64)

    def add(batch: list[Contribution]) -> None:
        totals.add_(torch.stack([p.sizes.nan_to_num(0.0, 0.0, 0.0).sum() for p in batch]))

    each_batch(model, x, torch.arange(len(x)), layout, 0, most, add)
    return [value if value > 0 else 1.0 for value in (totals / len(x)).tolist()]


def factor_sums(
    model: nn.Module,
    x: Tensor,
    ids: Tensor,
    layout: FisherLayout,
    clips: Sequence[float],
    *,
    count_weight: float,
    seed: int,
    most: int,
) -> Tensor:
    """Return q, float64 ``[layout.size + 1]``: see the module.

    clips: c_p, public; one below 1e-100 counts as that, so that no size is under-estimated.
    most: records at a time. 2 N T (n^2 + m^2) flops for a module of n inputs and m outputs at T
    positions, beside the passes.
    """
    total = torch.zeros(layout.size + 1, dtype=torch.float64)
    if not layout.parts:  # only who is counted is asked, and the model has no say in that
        total[-1] = count_weight * int(x.flatten(1).isfinite().all(1).sum())
        return total
    bounds = torch.tensor(clips, dtype=torch.float64).clamp(min=_LEAST_CLIP)[:, None]

    def add(batch: list[Contribution]) -> None:
        sizes = torch.stack([part.sizes for part in batch])
        finite = sizes.isfinite().all(0)
        factors = torch.where(finite, _DOWN / sizes.maximum(bounds), 0.0)
        for part, own, factor in zip(batch, layout.parts, factors, strict=True):
            total[own.slice] += part.weighted_sum(factor)
        total[-1] += count_weight * int(finite.sum())

    each_batch(model, x, ids, layout, seed, most, add)
    return total


def moved_by_one(layout: FisherLayout, count_weight: float) -> float:
    """Return how far one record more or less moves q: sqrt(P + w^2)."""
    return math.sqrt(len(layout.parts) + count_weight**2)


def record_signs(ids: Tensor, count: int, seed: int) -> Tensor:
    """Return signs ``[N, count]``, float64, each a function of seed, record and position alone."""
    z = ids[:, None] * count + torch.arange(count) + _mixed(torch.tensor(seed))
    return _mixed(z).bitwise_and(1).mul(2).sub(1).double()


def _mixed(z: Tensor) -> Tensor:
    """Return SplitMix64's mix of int64 z, whose bits are those of uint64."""
    z = z + -7046029254386353131
    z = (z ^ _shifted(z, 30)) * -4658895280553007687
    z = (z ^ _shifted(z, 27)) * -7723592293110705685
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Return z shifted right, zeros coming in."""
    return (z >> by) & ((1 << (64 - by)) - 1)
