"""A client gives the same numbers among hundreds and alone, noise included."""

from __future__ import annotations

import pytest
import torch

from dpkernels.federated import Visit
from dpkernels.federated.client_noise import ClientNoise
from dpkernels.ops.noise import RowKeys
from dpkernels.privacy.draws import Bits
from python_tests.federated.cases import (
    ALGORITHMS,
    COUNTS,
    SERVED,
    VIEWS,
    federation,
    finish,
    problem,
    problem_for,
    quietly,
    sampler,
    split,
    terms,
    watched,
)

# Sums over records and products with factors are added up in another order in a batched kernel: a
# few ulps of float32, which three rounds of Newton steps at gamma = 0.2 make a few times larger.
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


def same(one, other, **tolerance):
    for (ids, uploads), (wanted_ids, wanted) in zip(one, other, strict=True):
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(uploads, wanted, **tolerance or ROUNDING)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("name", "unit"), SERVED)
def test_batched_clients_upload_what_they_do_in_turn(name, unit, view):
    seen = {}
    for batched in (True, False):
        held = problem_for(ALGORITHMS[name])
        run = federation(ALGORITHMS[name], held, terms(held, unit, view), batched=batched)
        seen[batched] = watched(run)
        finish(run)
        assert all(uploads.isfinite().all() for _, uploads in seen[batched])
        assert max(run.multipliers.values()) > 0
        seen[batched].append((torch.arange(1), run.model()))
    same(seen[True], seen[False])


@pytest.mark.parametrize(("name", "unit"), SERVED)
def test_a_client_with_a_table_of_its_own_uploads_what_it_does_among_others(name, unit):
    algorithm = ALGORITHMS[name]
    held = problem_for(algorithm, dtype=torch.float64)
    told = terms(held, unit, "each_upload")
    run = federation(algorithm, held, told)
    stages, servers = run._schedule, []
    seen = watched(run)
    while not run.finished:
        servers.append(run.server)
        run.round()
    keys = quietly(RowKeys.from_seed, 1, held.clients)
    for client, alone in enumerate(split(held)):
        cohort_of = torch.arange(1)
        start = algorithm.client_start(run.terms, held.initial())
        state = {key: value[None] for key, value in start.items()}
        for index, stage in enumerate(stages):
            prepared = alone
            if stage is not stages[0]:
                prepared = algorithm.prepared(alone, servers[index])
            key, counter = keys.reserve(torch.tensor([client]), stage.releases)
            std = run.release.client_std(stage, run.multipliers[stage.name])
            noise = ClientNoise(stage, std, key, counter)
            own = algorithm.sent_to(stage, servers[index], torch.arange(held.clients))
            sent = algorithm.broadcast(stage, servers[index]) | {
                key: rows[client : client + 1] for key, rows in own.items()
            }
            cohort = prepared.cohort(cohort_of)
            chance = quietly(Bits, f"1/chance/{index + 1}").take(held.clients, torch.int64)
            visit = Visit(
                stage,
                run.terms,
                prepared,
                cohort,
                state,
                sent,
                noise,
                lambda cohort=cohort: cohort,
                lambda chance=chance, client=client: chance[client : client + 1],
            )
            upload, state = algorithm.client(visit)
            # Float64: what is left is 1e-16 of rounding, times what a solve to 1e-4 grows it by.
            wanted = seen[index][1][client]
            torch.testing.assert_close(upload[0], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("view", VIEWS)
def test_a_clients_noise_does_not_depend_on_who_else_is_in_the_round(view):
    held = problem((6,) * 6)
    told = terms(held, "user", view)
    whole = federation(ALGORITHMS["fedgd"], held, told, epsilon=None)
    clean, everybody = watched(whole), federation(ALGORITHMS["fedgd"], held, told)
    some = federation(
        ALGORITHMS["fedgd"], held, told, sampler=sampler("fixed", 6, 3), accountant="pld"
    )
    of_all, of_some = watched(everybody), watched(some)
    for run in (whole, everybody, some):
        run.round()
    ids, uploads = of_some[0]
    assert len(ids) == 3
    noise = (of_all[0][1] - clean[0][1])[ids] / everybody.release.client_std(
        everybody.stages[0], everybody.multipliers["gradient"]
    )
    its_own = (uploads - clean[0][1][ids]) / some.release.client_std(
        some.stages[0], some.multipliers["gradient"]
    )
    # Rounding of the sum of a gradient and the noise, divided by the noise's deviation.
    torch.testing.assert_close(noise, its_own, rtol=1e-4, atol=1e-5)


def test_no_two_clients_and_no_two_rounds_have_the_same_noise():
    held = problem((0,) * 5)  # without records an upload is noise alone
    run = federation(ALGORITHMS["fedgd"], held, terms(held, view="each_upload"), seed=None)
    seen = watched(run)
    finish(run)
    rows = torch.cat([uploads.flatten(1) for _, uploads in seen])
    assert len(rows) == 3 * len(COUNTS)
    assert len(rows.unique(dim=0)) == len(rows)
    correlations = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlations.abs().max() < 0.99


def test_gradients_are_the_same_bit_for_bit():
    # Sums over records are made one client after the other in the kernel: nothing is reordered.
    seen = {}
    for batched in (True, False):
        held = problem()
        run = federation(ALGORITHMS["fedgd"], held, terms(held), batched=batched)
        seen[batched] = watched(run)
        finish(run)
    same(seen[True], seen[False], rtol=0, atol=0)
