"""The budget holds, counted in bytes that are sent, and nothing finer fits."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from dpkernels.federated.merging.budget import (
    Settings,
    _steps,
    fedavg_bytes,
    paper_settings,
    payload_bytes,
    solve,
)
from python_tests.federated.merging.uploads import CNN, LENET, layout_of

NETWORKS = {"lenet": LENET, "cnn": CNN}


@pytest.mark.parametrize(("name", "size", "l_v"), [("lenet", 44190, 50), ("cnn", 939616, 243)])
def test_the_papers_rank_is_its_formula(name, size, l_v):
    layout = layout_of(NETWORKS[name])
    assert layout.size == size and fedavg_bytes(layout) == 4 * size

    settings = paper_settings(layout, 4 * size)

    def bits(rank: int) -> int:
        sizes = map(layout.factors, layout.layers)
        return sum(32 // 4 * (2 * a * rank + 2 * g * rank + 2 * rank) for a, g in sizes)

    assert settings == Settings("paper", 16, 8, l_v, (16, 16))
    assert bits(l_v) <= 16 * size < bits(l_v + 1)


@pytest.mark.parametrize(("s_q", "bits"), [(2, 16), (4, 8), (6, 5)])
def test_other_factors_of_its_table_5_leave_other_ranks(s_q, bits):
    layout = layout_of(LENET)
    found = paper_settings(layout, fedavg_bytes(layout), s_q)
    # 1752 values for each rank, 707,040 bits.
    assert (found.factors, found.rank) == (bits, 16 * 44190 // (bits * 1752))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_papers_form_fits_with_factors_and_not_with_diagonals(name):
    shapes = NETWORKS[name]
    layout, diagonal = layout_of(shapes), layout_of(shapes, "diagonal")
    budget = fedavg_bytes(layout)

    assert payload_bytes(layout, paper_settings(layout, budget)) <= budget
    # "32 (d + 2 L) bits": a scale of 4 bytes for the 4 bytes that the paper grants W's, and for F's
    # the 8 of a pair; header and names are ours.
    over = payload_bytes(diagonal, paper_settings(diagonal, budget), shared=True) - budget
    assert over == 2 * 4 * len(shapes) + 28


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("share", [0.55, 0.77, 1, 1.3])
def test_the_finest_that_fits_is_found(name, kind, shared, share):
    layout = layout_of(NETWORKS[name], kind)
    budget = int(share * fedavg_bytes(layout)) + 1

    found = solve(layout, budget, shared=shared)

    steps = list(_steps(layout))
    place = steps.index(found)
    assert payload_bytes(layout, found, shared=shared) <= budget
    assert payload_bytes(layout, steps[place + 1], shared=shared) > budget


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_one_more_rank_does_not_fit(name, share):
    layout = layout_of(NETWORKS[name])
    budget = int(share * fedavg_bytes(layout))

    found = solve(layout, budget)

    more = dataclasses.replace(found, rank=found.rank + 1)
    assert found.factors == 8 and payload_bytes(layout, found) <= budget
    assert payload_bytes(layout, more) > budget


@pytest.mark.parametrize(("name", "bits"), [("lenet", 12), ("cnn", 9)])
def test_fedavgs_bytes_are_enough_for_all_ranks(name, bits):
    layout = layout_of(NETWORKS[name])

    found = solve(layout, fedavg_bytes(layout))

    assert found.rank == max(max(layout.factors(layer)) for layer in layout.layers)
    assert (found.weights, found.factors) == (12, bits)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_finer_settings_never_take_fewer_bytes(kind):
    layout = layout_of(LENET, kind)
    lengths = [payload_bytes(layout, settings) for settings in _steps(layout)]
    assert all(here <= there for here, there in itertools.pairwise(lengths))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_a_budget_below_the_coarsest_is_refused_with_what_that_takes(kind):
    layout = layout_of(LENET, kind)
    with pytest.raises(ValueError, match=r"at least (\d+) bytes") as refused:
        solve(layout, 1000)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert payload_bytes(layout, solve(layout, least)) == least
    with pytest.raises(ValueError, match="at least"):
        solve(layout, least - 1)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_the_papers_form_names_its_least_budget(kind):
    layout = layout_of(LENET, kind)
    with pytest.raises(ValueError, match="paper's form must have at least") as refused:
        paper_settings(layout, 1000)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert paper_settings(layout, least).rank == 1
    with pytest.raises(ValueError, match="at least"):
        paper_settings(layout, least - 1)


def test_a_shared_layout_costs_its_hash():
    layout = layout_of(LENET)
    settings = solve(layout, fedavg_bytes(layout))
    saved = payload_bytes(layout, settings) - payload_bytes(layout, settings, shared=True)
    assert saved == len(layout.encode()) - 8


@pytest.mark.parametrize("change", [{"weights": 1}, {"factors": 33}, {"pair": (2, 1)}, {"rank": 0}])
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match="settings"):
        dataclasses.replace(Settings("symmetric", 12, 8, 1, (12, 12)), **change)
