"""A sent factor is L L^T + D: positive semidefinite, with A's diagonal, best of its rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkernels.federated.merging.low_rank import (
    Root,
    TruncatedSvd,
    trapezoid_entries,
    trapezoidal_root,
)
from dpkernels.federated.merging.packing import Reader
from python_tests.federated.merging.uploads import factor

EPS = torch.finfo(torch.float64).eps
SIZE = 30


def a_factor(kind: str) -> Tensor:
    """Return a matrix >= 0 of one kind that K-FAC gives."""
    generator = torch.Generator().manual_seed(1)
    if kind == "decaying":
        return factor(SIZE, generator)
    few = torch.randn(SIZE, 4, generator=generator)
    if kind == "dead units":
        few[::3] = 0
    if kind == "zero":
        few.zero_()
    if kind == "badly scaled":
        few *= torch.logspace(-6, 6, SIZE)[:, None]
    return few @ few.T


KINDS = ["decaying", "singular", "dead units", "zero", "badly scaled"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 3, SIZE, SIZE + 5])
def test_the_root_is_of_the_best_part_of_that_rank(kind, rank):
    a = a_factor(kind).double()
    values, vectors = torch.linalg.eigh(a)
    kept = values.clamp(min=0) * (torch.arange(SIZE) >= SIZE - rank)
    best = (vectors * kept) @ vectors.T

    root = trapezoidal_root(a, rank)

    assert root.shape == (SIZE, min(rank, SIZE))
    assert torch.equal(root, root.tril())
    # Householder's QR of n columns and the product err by a few n eps of the norm.
    assert float((root @ root.T - best).norm()) <= 10 * SIZE * EPS * float(best.norm())


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("rank", [1, 2, 9])
def test_entries_are_those_on_and_below_the_diagonal(size, rank):
    rank = min(rank, size)
    assert trapezoid_entries(size, rank) == int(torch.ones(size, rank).tril().sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 7, SIZE, 99])
@pytest.mark.parametrize("bits", [2, 3, 8, 12])
def test_what_comes_back_is_a_root_and_a_diagonal(kind, rank, bits):
    a, part = a_factor(kind), Root(SIZE, rank, bits)
    data = part.encode(a)

    root, residual = part.read(Reader(data))
    found = part.decode(Reader(data))

    assert len(data) == part.length
    assert torch.equal(root, root.tril()) and bool((residual >= 0).all())
    assert torch.equal(found, found.T)
    assert torch.equal(found.tril(), (root @ root.T + residual.diag()).tril())
    slack = SIZE * EPS * float(found.trace())
    assert float(torch.linalg.eigvalsh(found).min()) >= -slack


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 7])
def test_the_diagonal_is_kept_where_the_root_does_not_exceed_it(kind, rank):
    a, part = a_factor(kind).double(), Root(SIZE, rank, 8)
    root, residual = part.read(Reader(part.encode(a)))
    missing = a.diagonal() - root.square().sum(1)

    positive = missing > 0
    assert torch.equal(residual > 0, positive)
    # 254 steps over the logarithms' range: within half of one.
    if positive.any():
        logs = torch.log2(missing[positive])
        half = float(logs.max() - logs.min()) / 254 / 2
        assert float((torch.log2(residual[positive]) - logs).abs().max()) <= half * (1 + 1e-4)


def test_dead_units_stay_dead():
    a, part = a_factor("dead units"), Root(SIZE, SIZE, 8)

    found = part.decode(Reader(part.encode(a)))

    assert not found[::3].any() and not found[:, ::3].any()
    assert bool((found.diagonal()[1::3] > 0).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8, 12])
def test_full_rank_errs_by_the_rounding_of_the_root(kind, bits):
    a = a_factor(kind).double()
    root = trapezoidal_root(a, SIZE)
    # (L + E)(L + E)^T - L L^T with |E| <= h, half a step of the row; the diagonal errs no more: D
    # is what is missing of it, in 254 steps.
    half = root.abs().amax(1) / (2 ** (bits - 1) - 1) / 2
    sums = root.abs().sum(1)
    bound = half[:, None] * sums + sums[:, None] * half + SIZE * half[:, None] * half

    found = Root(SIZE, SIZE, bits).decode(Reader(Root(SIZE, SIZE, bits).encode(a)))

    slack = 10 * SIZE * EPS * a.norm()
    assert bool(((found - a).abs() <= bound * (1 + 1e-6) + slack).all())


def formula_84(x: Tensor, bits: int) -> Tensor:
    """Return the paper's quantiser of all of x, as it is written."""
    l_q, norm = 2 ** (bits - 1) - 1, float(x.abs().max().float())
    return norm * x.sign() * (torch.round(l_q * (x.abs() / norm)) / l_q)


@pytest.mark.parametrize("rank", [5, SIZE, 99])
def test_the_papers_form_is_its_formulas(rank):
    a = a_factor("decaying").double()
    u, s, vh = torch.linalg.svd(a)
    rows = min(rank, SIZE)
    wanted = formula_84(u[:, :rows], 8) @ formula_84(s[:rows], 8).diag()
    wanted = wanted @ formula_84(vh[:rows], 8)
    part = TruncatedSvd(SIZE, rank, 8)

    data = part.encode(a)
    found = part.decode(Reader(data))

    assert len(data) == part.length == (2 * SIZE * rows + rows) + 3 * 4
    # Scales are rounded to float32, up here and to nearest there: by eps of each of three.
    single = 4 * torch.finfo(torch.float32).eps
    assert float((found - wanted).norm()) <= single * float(a.norm()) * SIZE


def test_the_papers_form_loses_singular_values_below_a_254th():
    a, part = factor(SIZE, torch.Generator().manual_seed(1), decay=0.6), TruncatedSvd(SIZE, SIZE, 8)

    found = part.decode(Reader(part.encode(a)))

    values = torch.linalg.svdvals(a.double())
    kept = int((values > values[0] / 254).sum())
    assert kept < SIZE and int(torch.linalg.matrix_rank(found)) == kept
    ours = Root(SIZE, SIZE, 8)
    assert int(torch.linalg.matrix_rank(ours.decode(Reader(ours.encode(a))))) > kept
