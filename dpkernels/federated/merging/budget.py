"""How many bits go where, so that weights and Fisher together cost no more than a budget.

FedAvg's upload is 4 bytes for each of d values. Settings are ordered from coarse to fine, with
bytes that never fall along the order, so the finest that fits is found by bisection. Bytes are
those that are really sent: codes, scales, header.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import Tensor

from dpkernels.federated.merging.layout import Layout
from dpkernels.federated.merging.low_rank import Root, TruncatedSvd
from dpkernels.federated.merging.packing import Reader
from dpkernels.federated.merging.quantise import Logarithmic, Uniform, paper_bits

Form = Literal["symmetric", "paper"]
FORMS: tuple[Form, ...] = get_args(Form)

# Magic, version, flags, settings, records; see compress.py.
HEADER_BYTES = 20
DIGEST_BYTES = 8

# Bits of a weight that has factors, with a scale a row. On LeNet (low_rank.py) the objective at the
# 50th iterate moves by 6e-6 of its descent with 12, 1.4e-5 with 10, 2e-5 with 8, 9e-6 with the
# paper's 16: 12 are enough, and 4 more would cost the factors a fifth of their bits.
_WEIGHT_BITS = 12
# Bits of a factor's entries while the rank is not full. At 11, 7 and 4 bits of F for each weight, 7
# to 9 bits with the rank that fits err alike (below 1e-4, 5e-4, 3e-3); 4 bits err 3 to 20 times as
# much.
_FACTOR_BITS = 8
_MOST_FACTOR_BITS = 16
# Bits of a weight and its diagonal F together, where there are factors beside them; half each: on
# LeNet the minimiser moves by 1e-4 of its distance from the mean with 16 + 16, by 3e-4 with 14 of W
# and 18 of F, or 18 and 14; by 2e-4 with the 15 + 16 that fit, by 7e-2 with the paper's 16 + 16.
_PAIR_BITS = 24
_FEWEST_PAIR_BITS = 12
_MOST_PAIR_BITS = 48
# The paper's factors s_q for weights and diagonals, and for singular vectors (its Table 5).
_PAPER_WEIGHTS = 2
_PAPER_FACTORS = 4


@dataclass(frozen=True)
class Settings:
    """How finely everything is sent.

    weights: bits of a weight, unless its F is diagonal. factors: bits of an entry of a factor's
    root or singular vectors. rank: of every factor that is as large. pair: bits of a weight with
    diagonal F, and of that F.

    Raises ValueError for bits that are not 2 to 32, or a rank below 1.
    """

    form: Form
    weights: int
    factors: int
    rank: int
    pair: tuple[int, int]

    def __post_init__(self) -> None:
        if not all(2 <= bits <= 32 for bits in (self.weights, self.factors, *self.pair)):
            raise ValueError(f"settings: bits must be 2 to 32, got {self}")
        if self.rank < 1:
            raise ValueError(f"settings: the rank must be at least 1, got {self.rank}")


class Part(Protocol):
    """How one tensor is sent."""

    @property
    def length(self) -> int:
        """How many bytes ``encode`` returns."""
        ...

    def encode(self, x: Tensor, /) -> bytes:
        """Return what is sent of x."""
        ...

    def decode(self, reader: Reader, /) -> Tensor:
        """Return the tensor, float64. Raises ValueError for bytes that ``encode`` never writes."""
        ...


def parts(layout: Layout, settings: Settings) -> tuple[list[Part], list[Part]]:
    """Return how the state's tensors are sent, and those of F: A and G, or the diagonal, a layer.

    Both in the layout's order.
    """
    ours = settings.form == "symmetric"
    factor = Root if ours else TruncatedSvd
    diagonal = {name for one in layout.layers if one.kind == "diagonal" for name in one.parameters}
    state: list[Part] = []
    for name, shape in layout.shapes.items():
        bits = settings.pair[0] if name in diagonal else settings.weights
        state.append(Uniform(shape, bits, rows=ours))
    fisher: list[Part] = []
    for layer in layout.layers:
        if layer.kind == "kronecker":
            sizes = layout.factors(layer)
            fisher += [factor(size, settings.rank, settings.factors) for size in sizes]
        else:
            shape, bits = layout.shapes[layer.parameters[0]], settings.pair[1]
            fisher.append(Logarithmic(shape, bits) if ours else Uniform(shape, bits, rows=False))
    return state, fisher


def payload_bytes(layout: Layout, settings: Settings, *, shared: bool = False) -> int:
    """Return the length of the payload; shared: the server has the layout already."""
    state, fisher = parts(layout, settings)
    named = DIGEST_BYTES if shared else len(layout.encode())
    return HEADER_BYTES + named + sum(part.length for part in (*state, *fisher))


def fedavg_bytes(layout: Layout) -> int:
    """Return 4 d: what FedAvg sends, names and shapes not counted."""
    return 4 * layout.size


def solve(layout: Layout, budget: int, *, shared: bool = False) -> Settings:
    """Return the finest of our settings whose payload is at most ``budget`` bytes.

    In this order: bits of diagonals up to 24 a pair; the rank of factors with 8 bits, up to the
    full one; their bits, up to 16; then weights and diagonals again.

    Raises ValueError if not even the coarsest fits, with the bytes that it takes.
    """
    steps = _steps(layout)

    def bytes_of(settings: Settings) -> int:
        return payload_bytes(layout, settings, shared=shared)

    fits = bisect_right(steps, budget, key=bytes_of)
    if not fits:
        raise ValueError(
            f"budget: must be at least {bytes_of(steps[0])} bytes for this model, got {budget}"
        )
    return steps[fits - 1]


def _steps(layout: Layout) -> Sequence[Settings]:
    """Return our settings from coarse to fine; bytes do not fall along them."""

    def step(weights: int, factors: int, rank: int, pair: int) -> Settings:
        return Settings("symmetric", weights, factors, rank, (pair // 2, pair - pair // 2))

    sizes = [s for one in layout.layers if one.kind == "kronecker" for s in layout.factors(one)]
    full = max(sizes, default=1)
    diagonals = range(_FEWEST_PAIR_BITS, _PAIR_BITS)
    deeper = range(_FACTOR_BITS + 1, _MOST_FACTOR_BITS + 1)
    finer = range(_PAIR_BITS + 1, _MOST_PAIR_BITS + 1)
    return [
        *(step(_WEIGHT_BITS, _FACTOR_BITS, 1, pair) for pair in diagonals),
        *(step(_WEIGHT_BITS, _FACTOR_BITS, rank, _PAIR_BITS) for rank in range(1, full + 1)),
        *(step(_WEIGHT_BITS, bits, full, _PAIR_BITS) for bits in deeper),
        *(step(pair // 2, _MOST_FACTOR_BITS, full, pair) for pair in finer),
    ]


def paper_settings(layout: Layout, budget: int, s_q: int = _PAPER_FACTORS) -> Settings:
    """Return the paper's settings: weights and diagonals at s_q = 2, factors at ``s_q`` and l_v.

    l_v is the largest with (32/s_q) sum_l (2 m_{l-1} l_v + 2 m_l l_v + 2 l_v) <= 8 budget - 16 d,
    which is 16 d at FedAvg's budget: 50 for its LeNet, 243 for its CNN. The formula counts ranks
    above a factor's size, which cost nothing, and neither scales nor a header. So factors come out
    below the budget, and diagonals above it, by 8 bytes a layer and the header.

    Raises ValueError if the formula has no l_v >= 1, or diagonals do not fit by it, or for an
    ``s_q`` that is not 1 to 16.
    """
    bits, factor_bits = paper_bits(_PAPER_WEIGHTS), paper_bits(s_q)
    left = 8 * budget - bits * layout.size
    each = 0
    for layer in layout.layers:
        if layer.kind == "kronecker":
            each += factor_bits * (2 * sum(layout.factors(layer)) + 2)
        else:
            left -= bits * math.prod(layout.shapes[layer.parameters[0]])
    if left < each:
        raise ValueError(
            f"budget: the paper's form must have at least {math.ceil((each - left) / 8) + budget} "
            f"bytes for this model, got {budget}"
        )
    return Settings("paper", bits, factor_bits, max(left // each, 1) if each else 1, (bits, bits))
