"""The benchmark of what F costs, on a network that takes no time."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.fisher_overhead import CASES, Case, compare, table
from benchmarks.timing import Budget


def test_the_papers_networks_have_its_numbers_of_parameters():
    counts = [sum(p.numel() for p in case.model().parameters()) for case in CASES]
    assert counts == [44_190, 939_616]


def test_every_kind_and_expectation_is_measured():
    case = Case("small", (1, 16, 16), (1, 2), (2, 3, 3), 8, 8)
    found = compare(case, 8, Budget(rounds=1))
    assert {(one.kind, one.expectation) for one in found} == {
        (kind, how)
        for kind in ("kronecker", "diagonal")
        for how in ("exact", "sampled", "rademacher")
    }
    for one in found:
        assert abs(one.share.median * 30 * one.epoch.median / one.fisher.median - 1) < 1e-9
    shown = table([asdict(one) for one in found]).splitlines()
    assert len(shown) == 2 + 6 and all("small, 8" in row for row in shown[2:])
    assert sum("target 5%" in row for row in shown) == 4
