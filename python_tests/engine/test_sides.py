"""Sketches of factors tell those of other probes apart, and not those that are rounded."""

from __future__ import annotations

import math

import pytest
import torch

from dpkernels.engine.sides import IDENTITY, Scale, Sides, sketches_of
from dpkernels.ops.factor import Diagonal, Full, LowRank

SIZE, RANK = 37, 5


def orthonormal(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(x).Q


def sketch(sides):
    (found,) = sketches_of(sides).values()
    return found


def forms(seed=0):
    """Return one operator in three forms: a matrix, eigenvectors, and these with other signs."""
    vectors = orthonormal(seed)[:, :RANK]
    values = torch.arange(1.0, RANK + 1, dtype=torch.float64)
    low = LowRank(vectors, values, 0.5)
    signs = torch.tensor([1, -1, 1, -1, -1], dtype=torch.float64)
    return low, LowRank(vectors * signs, values, 0.5), Full(low.dense())


@pytest.mark.parametrize("side", ["left", "right"])
def test_forms_of_one_operator_have_one_sketch(side):
    first, *others = (sketch(Sides(**{side: factor})) for factor in forms())
    for other in others:
        # SIZE products are added up for an element, of which there are SIZE.
        assert math.dist(first, other) <= SIZE**2 * 2**-52 * math.hypot(*first)


def test_other_operators_have_other_sketches():
    first, other = (sketch(Sides(forms(seed)[0])) for seed in (0, 1))
    assert math.dist(first, other) > 0.1 * math.hypot(*first)
    values = torch.linspace(1, 2, SIZE)
    diagonals = [sketch(Sides(Diagonal(x))) for x in (values, values.flip(0))]
    assert math.dist(*diagonals) > 0.1 * math.hypot(*diagonals[0])
    scales = [sketch(Sides(scale=Scale({"weight": x}))) for x in (values, values.flip(0))]
    assert math.dist(*scales) > 0.1 * math.hypot(*scales[0])


def test_each_side_has_its_own_sketch_however_small_beside_the_other():
    large, small = Diagonal(torch.full((SIZE,), 1e9)), Diagonal(torch.ones(3))
    found = sketches_of(Sides(large, small))
    assert found.keys() == {"left", "right"}
    assert found["right"] == sketches_of(Sides(right=small))["right"]
    assert sketches_of(IDENTITY) == {}
