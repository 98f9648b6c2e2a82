"""Uploads that are broken, late, lost or forged, and clients that cannot compute."""

from __future__ import annotations

import pytest
import torch

from dpkernels.federated import FedGD, FedNew, Message, Scaffold
from dpkernels.federated.received import FAULTS, collect
from dpkernels.privacy.samplers import ShuffledSampler
from python_tests.federated.cases import (
    ALGORITHMS,
    SERVED,
    VIEWS,
    features,
    federation,
    finish,
    problem,
    problem_for,
    quietly,
    sampler,
    terms,
    watched,
)

CLIENTS = 6
SHAPE = (3, 4)


def messages(ids, index, uploads):
    return [Message(int(i), index, values) for i, values in zip(ids, uploads, strict=True)]


def nan(message):
    values = message.values.clone()
    values[0, 0] = torch.nan
    return [Message(message.client, message.round, values)]


BREAKS = {
    "missing": lambda message: [],
    "not finite": nan,
    "wrong shape": lambda m: [Message(m.client, m.round, m.values[:1])],
    "wrong dtype": lambda m: [Message(m.client, m.round, m.values.double())],
    "wrong round": lambda m: [Message(m.client, m.round - 1, m.values)],
    "unknown client": lambda m: [Message(m.client + 100, m.round, m.values)],
    "repeated": lambda m: [m, Message(m.client, m.round, m.values + 5)],
}
COUNTED = {name: {name: 1} for name in FAULTS} | {
    "wrong dtype": {"wrong shape": 1},
    "unknown client": {"unknown client": 1, "missing": 1},
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_faulty_upload_is_counted_and_left_out(name):
    ids = torch.arange(CLIENTS)
    uploads = torch.randn(CLIENTS, *SHAPE)
    sent = messages(ids, 4, uploads)
    got = collect([*BREAKS[name](sent[0]), *sent[1:]], ids, 4, SHAPE, torch.float32)
    counts = name == "repeated"  # the first one does
    assert got.clients.tolist() == ids.tolist()[0 if counts else 1 :]
    assert torch.equal(got.uploads, uploads[0 if counts else 1 :])
    assert dict(got.faults) == COUNTED[name]


def test_a_silent_client_is_missing_though_another_sent_two_broken_uploads():
    ids, uploads = torch.arange(3), torch.full((3, *SHAPE), torch.inf)
    sent = messages(ids, 1, uploads)
    got = collect([sent[0], sent[0]], ids, 1, SHAPE, torch.float32)
    assert dict(got.faults) == {"not finite": 2, "missing": 2}
    assert got.uploads.shape == (0, *SHAPE)


def transport(name, broken):
    """Break what ``broken(round)`` clients send."""

    def carry(index, ids, uploads):
        sent = messages(ids, index, uploads)
        first = broken(index)
        return [m for message in sent[:first] for m in BREAKS[name](message)] + sent[first:]

    return carry


@pytest.mark.parametrize("name", [name for name in BREAKS if name != "repeated"])
@pytest.mark.parametrize(
    "algorithm", [FedGD(), FedNew(dual="clean", radius=0.5, hessian="exact")], ids=["gd", "new"]
)
def test_with_too_few_uploads_nothing_is_opened_accounted_or_kept(name, algorithm):
    held = problem((5,) * CLIENTS)
    lossy = transport(name, lambda index: 3 if index == 2 else 0)
    run = federation(algorithm, held, terms(held), transport=lossy, max_dropouts=2)
    assert run.round().released
    before = run.state_dict()
    lost = run.round()
    assert not lost.released and lost.arrived == CLIENTS - 3
    after = run.state_dict()
    for part in ("server", "clients"):
        for key, value in before[part].items():
            assert torch.equal(value, after[part][key])
    assert run.accountant.steps == run.rounds_released == 1
    assert run.faults[next(iter(COUNTED[name]))] == 3
    assert run.round().released and run.accountant.steps == 2
    # The round that was lost changed nothing but the noise: the budget still fits.
    assert finish(run).epsilon() <= 5.0


def test_what_is_released_never_has_less_noise_than_is_stated():
    clients, width = 8, 40
    held = problem((0,) * clients)
    seen = []

    def lossy(index, ids, uploads):
        kept = messages(ids, index, uploads)[index % 4 :]
        if len(kept) >= clients - 2:
            seen.append((len(kept), torch.stack([m.values for m in kept]).double().sum(0)))
        return kept

    told = terms(held, rounds=width)
    run = federation(FedGD(), held, told, transport=lossy, max_dropouts=2)
    released = finish(run).rounds_released
    assert released == len(seen) == width
    std = run.statement(run.stages[0]).queries[0].noise_std
    for arrived in (6, 7, 8):
        sums = torch.stack([total for count, total in seen if count == arrived])
        expected = arrived / (clients - 2)
        assert expected >= 1
        ratio = (sums.square().mean() / std**2).item()
        assert abs(ratio / expected - 1) < 5 * (2 / sums.numel()) ** 0.5


def test_where_uploads_are_seen_a_round_counts_whatever_arrives():
    held = problem((5,) * CLIENTS)
    lost = transport("missing", lambda index: CLIENTS)
    run = federation(FedGD(), held, terms(held, view="each_upload"), transport=lost)
    before = run.model().clone()
    assert run.round().released
    assert run.accountant.steps == 1 and run.epsilon() > 0
    assert torch.equal(run.model(), before)  # the mean of nothing over a public number is 0


def test_the_sum_is_divided_by_a_public_number_whoever_answers():
    held = problem((5,) * CLIENTS)
    told = terms(held)
    whole, some = (
        federation(FedGD(lr=1.0), held, told, epsilon=None, transport=carry, max_dropouts=3)
        for carry in (None, transport("missing", lambda index: 2))
    )
    uploads = watched(whole)
    whole.round()
    some.round()
    torch.testing.assert_close(some.model(), -uploads[0][1][2:].sum(0) / CLIENTS)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("name", "unit"), SERVED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, 1e4], ids=str)
def test_broken_records_of_a_client_neither_stop_a_round_nor_reach_its_upload(
    name, unit, view, value
):
    held = problem_for(ALGORITHMS[name])
    features(held)[3] *= value
    run = federation(ALGORITHMS[name], held, terms(held, unit, view))
    seen = watched(run)
    finish(run)
    assert not run.faults
    assert all(uploads.isfinite().all() for _, uploads in seen)
    assert run.model().isfinite().all()


@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize(
    "name", ["fedgd", "fednew exact none", "scaffold none", "fedfc", "fednew none uploaded"]
)
def test_clients_whose_records_are_all_broken_upload_what_clients_without_any_do(name, unit):
    seen = []
    for counts in ((4, 4), (0, 0)):
        held = problem(counts)
        held.records.x.fill_(torch.nan)
        run = federation(ALGORITHMS[name], held, terms(held, unit, "each_upload"))
        seen.append(watched(run))
        finish(run)
    for (_, broken), (_, none) in zip(*seen, strict=True):
        assert broken.abs().max() > 0
        if "exact" in name:
            # Clients with records are solved by another formula: the same up to its rounding.
            assert torch.allclose(broken, none, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(broken, none)


@pytest.mark.parametrize("value", [1e4, 1e12, 1e20])
@pytest.mark.parametrize("hessian", ["exact", "cg", "covariance", "none"])
def test_a_user_whose_system_cannot_be_solved_changes_nobody_elses_upload(hessian, value):
    seen = []
    for factor in (1.0, value):
        held = problem()
        held.records.x[: 7 // 2] *= factor
        run = federation(FedNew(hessian=hessian), held, terms(held, "user", "each_upload"))
        seen.append(watched(run))
        run.round()
    (_, plain), (_, large) = seen[0][0], seen[1][0]
    # Solved one by one, where a matrix fails: sums may be added up in another order.
    torch.testing.assert_close(plain[1:], large[1:], rtol=1e-5, atol=1e-6)


def test_a_cohort_of_a_shuffled_epoch_that_was_lost_is_asked_again():
    # The accountant counts an epoch as one exposure of each client: nobody may be in it twice.
    held, clients = problem((3,) * 6), 6
    released = []

    def lossy(index, ids, uploads):
        if index in (1, 4):
            return []
        released.append(ids.tolist())
        return messages(ids, index, uploads)

    run = federation(
        FedGD(),
        held,
        terms(held, rounds=6),
        transport=lossy,
        sampler=sampler("shuffled", clients, 2),
    )
    finish(run)
    assert run.rounds_begun == 8
    for epoch in (released[:3], released[3:]):
        assert sorted(client for cohort in epoch for client in cohort) == list(range(clients))


def test_a_cohort_that_could_never_be_released_is_refused():
    held = problem((3,) * 5)
    drawn = quietly(ShuffledSampler, 5, 2, seed=1)
    with pytest.raises(ValueError, match="the last of an epoch has 1"):
        federation(FedGD(), held, terms(held), sampler=drawn)
    federation(FedGD(), held, terms(held), sampler=drawn, max_dropouts=1)


def test_an_error_of_a_client_step_spends_nothing_under_secure_aggregation():
    held = problem()
    run = federation(Scaffold(control="none", local_steps=1), held, terms(held))
    run.round()
    theta = run.model().clone()
    step, run.algorithm = run.algorithm, None
    with pytest.raises(AttributeError):
        run.round()
    run.algorithm = step
    assert run.accountant.steps == 1 and torch.equal(run.model(), theta)
    assert finish(run).epsilon() <= 5.0
