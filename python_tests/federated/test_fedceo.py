"""FedCEO: who starts from what, the mean identity, what is seen, and epsilon as it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dpkernels.federated import FedCEO, LocalDPSGD, Message, Seen, UDPFedAvg
from dpkernels.federated.algorithms.fedceo import last_modules
from dpkernels.federated.folding import fold, unfold
from dpkernels.federated.release import Release
from dpkernels.ops.tsvd import soft_threshold
from dpkernels.privacy import make_accountant
from dpkernels.privacy.mechanism import EveryRecord, Poisson, WithoutReplacement
from python_tests.federated.cases import (
    federation,
    finish,
    network,
    problem,
    quietly,
    sampler,
    terms,
    watched,
)

EIGHT = (4, 3, 5, 2, 4, 6, 3, 4)


def ceo(restart, **options):
    chosen = {"lr": 1.0, "lam": 0.5, "theta": 1.1, "interval": 2, "local_epochs": 1}
    return FedCEO(restart=restart, **chosen | options)


def starts(run):
    """Return a list that gets (ids, where each starts) of every round."""
    found, step = [], run._clients_step

    def noting(stage, ids, sent, own):
        theta = (sent | own)["theta"]
        found.append((ids.clone(), theta.expand(len(ids), *run.terms.shape).clone()))
        return step(stage, ids, sent, own)

    run._clients_step = noting
    return found


def made(restart, view="each_upload", *, size=4, rounds=6, dtype=torch.float64, **options):
    held = network(EIGHT, dtype=dtype)
    told = terms(held, "user", view, rounds=rounds)
    drawn = sampler("fixed", len(EIGHT), size)
    chosen = {"sampler": drawn, "accountant": "rdp"} | options.pop("run", {})
    return federation(ceo(restart, **options), held, told, **chosen)


def slices_of(run, models, t):
    """Return the slices by fold, soft threshold and unfold of models ``[K, D]``."""
    tau = 1.1 ** (t / 2) / (2 * 0.5)
    layers = run.terms.layers
    return unfold(layers, soft_threshold(fold(layers, models), tau).tensors, models)


@pytest.mark.parametrize("restart", ["own", "slot"])
def test_after_a_folded_round_clients_start_from_slices(restart):
    run = made(restart)
    begun, sent = starts(run), watched(run)
    thetas = [run.model().clone()]
    while not run.finished:
        run.round()
        thetas.append(run.model().clone())
    returned = 0
    for t in range(1, 7):
        ids, first = begun[t - 1]
        wanted = thetas[t - 1].expand_as(first).clone()
        if t > 1 and (t - 1) % 2 == 0:
            last_ids, last = begun[t - 2]
            slices = slices_of(run, last + sent[t - 2][1], t - 1)
            torch.testing.assert_close(thetas[t - 1], slices.mean(0))
            for row, client in enumerate(ids.tolist()):
                if restart == "slot":
                    wanted[row] = slices[row]
                elif client in last_ids.tolist():
                    wanted[row] = slices[last_ids.tolist().index(client)]
                    returned += 1
        torch.testing.assert_close(first, wanted)
        if t % 2:  # a round that is not folded takes the mean of the models
            torch.testing.assert_close(thetas[t], (first + sent[t - 1][1]).mean(0))
    assert returned > 0 or restart == "slot"


def test_slots_go_to_whoever_answered_and_the_rest_starts_from_the_mean():
    def lossy(index, ids, uploads):
        sent = zip(ids.tolist(), uploads, strict=True)
        return [Message(i, index, values) for i, values in sent][1 if index == 2 else 0 :]

    run = made("slot", rounds=3, run={"transport": lossy})
    begun = starts(run)
    finish(run)
    first = begun[2][1]
    assert len(first.unique(dim=0)) == 4  # three slices, and their mean
    torch.testing.assert_close(first[3], first[:3].mean(0))


@pytest.mark.parametrize("restart", ["own", "slot", "mean"])
def test_a_round_that_nobody_answers_leaves_theta(restart):
    def silent(index, ids, uploads):
        return []

    run = made(restart, rounds=2, lam=math.inf, run={"transport": silent})
    before = run.model().clone()
    torch.testing.assert_close(finish(run).model(), before)


@pytest.mark.parametrize("shape", ["all", 1])
@pytest.mark.parametrize("lam", [0.05, 0.5, 5.0, math.inf])
def test_the_mean_restart_is_the_mean_of_all_folded_uploads(lam, shape):
    held = network((0,) * 7, dtype=torch.float64)
    told = terms(held, "user", cohort=7.0)
    last = None if shape == "all" else shape
    mean, own = (ceo(r, lam=lam, fold_last=last, lr=0.3) for r in ("mean", "own"))
    stage = mean.stages(told)[0]
    uploads = torch.randn(7, 43, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states = [a.server_start(told, held.initial()) for a in (mean, own)]
    for _ in range(2):
        states[0] = mean.server(stage, told, states[0], Seen(uploads.mean(0)))
        seen = Seen(uploads.mean(0), None, torch.arange(7), uploads)
        states[1] = own.server(stage, told, states[1], seen)
        torch.testing.assert_close(states[0]["theta"], states[1]["theta"], rtol=1e-9, atol=1e-9)
    assert len(states[1]["slices"]) == 7
    if lam > 0.1:
        assert not torch.equal(states[1]["slices"][0], states[1]["slices"][1])


@pytest.mark.parametrize("restart", ["own", "slot"])
def test_the_order_of_clients_matters_but_for_cyclic_shifts(restart):
    held = network((0,) * 5, dtype=torch.float64)
    told, algorithm = terms(held, "user"), ceo(restart, interval=1, lam=0.3)
    uploads = torch.randn(5, 43, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def slices(order):
        state = algorithm.server_start(told, held.initial())
        seen = Seen(uploads.mean(0), None, torch.arange(5), uploads[order])
        found = algorithm.server(algorithm.stages(told)[0], told, state, seen)["slices"]
        return found[torch.argsort(torch.tensor(order))]

    plain = slices([0, 1, 2, 3, 4])
    torch.testing.assert_close(slices([3, 4, 0, 1, 2]), plain)
    assert (slices([1, 0, 2, 3, 4]) - plain).norm() > 1e-3 * plain.norm()


def test_without_a_threshold_mean_restarts_are_udp_fedavg():
    held = network()
    told = terms(held, "user")
    plain = UDPFedAvg(lr=1.0, local_epochs=1)
    runs = [finish(federation(a, held, told)) for a in (plain, ceo("mean", lam=math.inf))]
    torch.testing.assert_close(runs[0].model(), runs[1].model())


def test_thresholds_grow_with_the_rounds():
    algorithm = FedCEO(lam=70.0, theta=1.08, interval=30)
    assert algorithm.threshold(30) == pytest.approx(1.08 / 140)
    assert algorithm.threshold(300) == pytest.approx(1.08**10 / 140)
    assert FedCEO(lam=math.inf).threshold(10) == 0.0


def test_only_the_last_modules_are_folded_and_others_averaged():
    layers = network().layers
    assert [x.name for x in last_modules(layers, 1)] == ["2.weight", "2.bias"]
    assert last_modules(layers, None) == layers == last_modules(layers, 9)
    run = made("slot", rounds=2, fold_last=1)
    finish(run)
    slices, begin = run.server["slices"], last_modules(layers, 1)[0].begin
    assert len(slices[:, :begin].unique(dim=0)) == 1
    assert len(slices[:, begin:].unique(dim=0)) == 4


def test_the_server_of_mean_restarts_is_shown_no_upload():
    run, seen = made("mean", "aggregate"), []
    server = FedCEO.server

    class Noting(FedCEO):
        def server(self, stage, terms, state, given):
            seen.append(given)
            return server(self, stage, terms, state, given)

    run.algorithm = Noting(**vars(run.algorithm))
    finish(run)
    assert run.void is None and run.epsilon() <= 5.0
    assert all(x.uploads is None and x.clients is None and not x.own for x in seen)


@pytest.mark.parametrize("restart", ["own", "slot"])
def test_the_papers_restarts_claim_an_epsilon_that_is_void(restart):
    run = finish(made(restart, "aggregate"))
    assert run.epsilon() is None and "the paper's" in run.void
    assert 0 < run.claimed_epsilon() <= 5.0


@pytest.mark.parametrize("restart", ["own", "slot"])
def test_single_uploads_are_refused_where_only_their_sum_has_noise(restart):
    held = network(EIGHT)
    told = terms(held, "user", adjacency="add-remove")
    drawn = sampler("poisson", 8, 4)
    with pytest.raises(ValueError, match="its server takes single uploads"):
        federation(ceo(restart), held, told, sampler=drawn, accountant="rdp")
    assert federation(ceo("mean"), held, told, sampler=drawn, accountant="rdp").void is None


@pytest.mark.parametrize("restart", ["own", "slot"])
def test_slices_resume_bit_for_bit(restart, tmp_path):
    whole, first, second = (made(restart, seed_of) for seed_of in ["each_upload"] * 3)
    finish(whole)
    for _ in range(2):
        first.round()
    assert len(first.server["slices"]) == 4
    first.save(tmp_path / "run.pt")
    quietly(second.load, tmp_path / "run.pt")
    finish(second)
    assert torch.equal(whole.model(), second.model())
    assert torch.equal(whole.server["slices"], second.server["slices"])


def test_clients_that_get_a_slice_are_counted_by_the_byte():
    run = made("slot", dtype=torch.float32)
    rounds = []
    while not run.finished:
        rounds.append(run.round().bytes_down)
    assert rounds == [4 * 43 * 4] * 6


# FEDERATED.md: T 300, K 10 of 100, delta 1e-5, sigma 1 / 1.5 / 2, and by which accountant.
FIGURES = [
    ("aggregate", Poisson(0.1), "add-remove", "pld", (12.4, 6.3, 4.2)),
    ("aggregate", WithoutReplacement(10, 100), "replace-one", "rdp", (71, 28, 15.7)),
    ("each_upload", WithoutReplacement(10, 100), "replace-one", "gaussian", (747, 364, 223)),
]


@pytest.mark.parametrize(("view", "sampling", "adjacency", "name", "wanted"), FIGURES, ids=str)
def test_epsilon_of_the_papers_setting_is_what_the_statements_say(
    view, sampling, adjacency, name, wanted
):
    held = network()
    told = terms(held, "user", view, adjacency=adjacency, rounds=300)
    stage = FedCEO(clip=1.0).stages(told)[0]
    release = Release(told, sampling, 10.0)
    for sigma, epsilon in zip((1.0, 1.5, 2.0), wanted, strict=True):
        # sigma C is the noise of what is seen, the sum or one upload. A multiplier is over the
        # sensitivity, 2 C where users are replaced.
        multiplier = sigma / (2 if adjacency == "replace-one" else 1)
        statement = release.statement(stage, multiplier)
        accountant = make_accountant(name)
        # On paper: the tails that a generator does not reach count e^epsilon times.
        exact = tuple(replace(query, unreachable=0.0) for query in statement.queries)
        accountant.compose(replace(statement, queries=exact), stage.rounds)
        assert accountant.epsilon(1e-5) == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize("make", [LocalDPSGD, lambda **o: FedCEO(restart="slot", **o)])
def test_each_step_of_dpsgd_draws_its_records_and_is_accounted(make):
    held = problem((9,) * 4)
    told = terms(held, "record", "each_upload", adjacency="add-remove")
    run = federation(make(local_steps=5), held, told, record_rate=0.2, accountant="rdp")
    cohorts, sums = [], held.clipped_gradient_sums

    def noting(cohort, theta, bound, most):
        cohorts.append(cohort.held.spans.clone())
        return sums(cohort, theta, bound, most)

    held.clipped_gradient_sums = noting
    finish(run)
    assert run.accountant.history == [(run.statement(run.stages[0]), 15)]
    assert run.statement(run.stages[0]).sampling == Poisson(0.2)
    assert len({tuple(x.flatten().tolist()) for x in cohorts}) > 10
    assert run.epsilon() <= 5.0


def test_steps_of_dpsgd_are_noisy_means_over_a_public_number():
    held = problem((9, 0, 4), dtype=torch.float64)
    told = terms(held, "record", "each_upload")
    run = federation(
        LocalDPSGD(lr=0.5, local_steps=3, local_lr=0.4, clip=0.2), held, told, epsilon=None
    )
    uploads, theta = watched(run), run.model().clone()
    run.round()
    cohort, y = held.cohort(torch.arange(3)), theta.expand(3, *held.shape)
    for _ in range(3):
        y = y - 0.4 * held.clipped_gradient_sums(cohort, y, 0.2) / 8.0
    torch.testing.assert_close(uploads[0][1], y - theta)
    torch.testing.assert_close(run.model(), theta + 0.5 * (y - theta).mean(0))


def test_statements_of_all_clients_are_those_of_every_record():
    held = network()
    told = terms(held, "user", "each_upload")
    run = federation(ceo("own"), held, told)
    assert run.statement(run.stages[0]).sampling == EveryRecord()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"restart": "all"}, "restart must be one of own, slot, mean"),
        ({"lam": 0.0}, "lam must be"),
        ({"lam": math.nan}, "lam must be"),
        ({"theta": math.inf}, "theta must be"),
        ({"interval": 0}, "interval must be >= 1"),
        ({"fold_last": 0}, "fold_last must be >= 1"),
        ({"local_steps": 0}, "local_steps must be >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        FedCEO(**wrong)
