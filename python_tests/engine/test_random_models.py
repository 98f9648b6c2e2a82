"""Whatever the model, the records and the way to clip: one record moves the sum by C, or less.

Each record of a batch goes in turn, without noise. What is released must move by at most the
sensitivity times ``1 + 1e-6``, or the engine must refuse, before anything is released and without
a word about the records. Nothing else of the model may change.

What is measured must be that record's part alone. Sums in float32 round what other records add,
too, and products of another number of rows may round differently. So in float64 the record is
removed, and in float32 it is nulled: zeros take its place, and its loss counts zero times. Its part
is then exactly zero, and everything of the others is computed from the same numbers. Three other
records at most, each clipped to C, leave float32 sums less than 1e-6 C to round. Beside an extreme
record no other is removed: at 1e20 a gradient's direction hangs on the last bits of products, which
another number of rows changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from python_tests.engine.random_models.blocks import BY_POSITION, ORDINARY
from python_tests.engine.random_models.cases import (
    Case,
    Records,
    Refused,
    made,
    released,
    runs_plainly,
)
from python_tests.engine.random_models.hostile import HOSTILE

KINDS = [*ORDINARY, *BY_POSITION, *HOSTILE]
# 0 has saturated gates, 4 and 5 have pairs of records that a sort tells apart.
SEEDS = (0, 1, 4, 5)


def check(case: Case) -> None:
    runs_plainly(case)
    moved, refusals = furthest(case)
    assert moved <= 1 + 1e-6, f"{case.kinds}: one record moves the sum by {moved:.8g} C"
    for refusal in refusals:
        assert not case.must_train, f"{case.kinds}: refused: {refusal}"
        assert not shows_records(refusal, case), f"{case.kinds}: {refusal}"


def furthest(case: Case) -> tuple[float, list[str]]:
    """Return how far a record moves the sum at most, in units of C, and why steps were refused."""
    batch = case.records
    moves, refusals = [0.0], []
    try:
        whole, bound = released(case, batch)
    except Refused as refusal:
        return 0.0, [str(refusal)]
    for rest in neighbours(batch):
        try:
            part, _ = released(case, rest)
        except Refused as refusal:
            refusals.append(str(refusal))
        else:
            moves.append(float((whole - part).norm()) / bound)
    # Not max(), which may pass over a NaN.
    return float(torch.tensor(moves, dtype=torch.float64).max()), refusals


def neighbours(batch: Records) -> Iterator[Records]:
    """Yield the batch without each record in turn: in float64 removed where that is fair."""
    wide = batch.x.dtype == torch.float64
    for record in range(len(batch)):
        fair = wide and batch.extreme in (None, record)
        yield batch.removed(record) if fair else batch.nulled(record)


def shows_records(message: str, case: Case) -> bool:
    """Return whether a message has a list of tokens, or a number of a record, in it."""
    numbers = re.findall(r"-?\d+\.\d+(?:e[+-]?\d+)?", message)
    own = {f"{float(v):.3g}" for v in case.records.x.flatten()}
    lists = [str(row.tolist()).strip("[]") for row in (*case.records.tokens, case.records.tokens.T)]
    return any(f"{float(n):.3g}" in own for n in numbers) or any(
        "," in row and row in message for row in lists
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_record_moves_the_sum_by_its_bound_at_most(kind, dtype):
    for seed in SEEDS:
        check(made(seed, dtype, (kind,)))


@given(seed=st.integers(0, 2**32 - 1), wide=st.booleans())
def test_so_it_does_in_random_models(seed, wide):
    check(made(seed, torch.float64 if wide else torch.float32))
