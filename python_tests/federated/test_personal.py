"""Local training and personal models: what leaves a client is clipped, and the rest stays there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dpkernels.federated import PPSGD, Centaur, FedCEO, LocalDPSGD, UDPFedAvg, Visit
from python_tests.federated.cases import (
    federation,
    finish,
    network,
    problem,
    sampler,
    terms,
    watched,
)

USERS = {
    "udp-fedavg": UDPFedAvg(clip=0.7),
    "fedceo": FedCEO(clip=0.7),
    "ppsgd": PPSGD(clip=0.7),
    "centaur": Centaur(clip=0.7, local_lr=1.0),
}
PERSONAL = {"ppsgd": PPSGD(local_epochs=2), "centaur": Centaur(local_steps=2, head_steps=3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", USERS)
def test_a_whole_user_moves_an_upload_by_the_clip_at_most(name, dtype):
    """Records, starts and states of all scales; replacing a user is twice that."""
    algorithm, longest = USERS[name], 0.0
    generator = torch.Generator().manual_seed(0)
    for trial in range(30):
        scale = 10 ** (4 * torch.rand(1, generator=generator).item() - 2)
        held = network((6, 0, 9, 1), dtype=dtype, seed=trial, scale=scale)
        told = terms(held, "user")
        stage = algorithm.stages(told)[0]
        theta = held.initial() + scale**0.5 * torch.randn(43, generator=generator).to(dtype)
        start = algorithm.client_start(told, theta)
        state = {key: value.expand(4, *value.shape).clone() for key, value in start.items()}
        cohort, released = held.cohort(torch.arange(4)), []

        def noting(values, released=released):
            released.append(values.double().norm(dim=1))
            return values

        for turn in range(3):
            visit = Visit(
                stage,
                told,
                held,
                cohort,
                state,
                {"theta": theta},
                noting,
                lambda cohort=cohort: cohort,
                lambda turn=turn: torch.arange(4) + turn,
            )
            upload, state = algorithm.client(visit)
            assert all(value.isfinite().all() for value in state.values())
            assert not upload[1].any()  # nobody there, nothing to upload
        longest = max(longest, torch.stack(released).max().item())
    assert 0.99 * 0.7 < longest <= stage.query.sensitivity * (1 + 1e-6)
    assert stage.query.moved("replace-one") == 2 * 0.7


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ppsgd_is_sgd_of_two_parts_with_one_gradient(momentum):
    held = network((5,), dtype=torch.float64)
    told = terms(held, "user")
    chosen = {"local_epochs": 3, "local_batch": 5, "local_lr": 0.2, "local_momentum": momentum}
    algorithm = PPSGD(clip=1e3, personal_lr=0.05, **chosen)
    run = federation(algorithm, held, told, epsilon=None)
    seen, theta = watched(run), run.model().clone()
    run.round()
    common, own, velocity = theta.clone(), torch.zeros_like(theta), torch.zeros_like(theta)
    for _ in range(3):
        gradient = held.gradient_sums(held.cohort(torch.arange(1)), common + own)[0] / 5
        velocity = momentum * velocity + gradient
        common, own = common - 0.2 * velocity, own - 0.05 * velocity
    torch.testing.assert_close(seen[0][1][0], common - theta)
    torch.testing.assert_close(run._clients["personal"][0], own)


def test_ppsgd_without_a_personal_rate_is_udp_fedavg():
    held = network()
    told = terms(held, "user")
    runs = [finish(federation(a, held, told)) for a in (PPSGD(personal_lr=0.0), UDPFedAvg(lr=0.1))]
    torch.testing.assert_close(runs[0].model(), runs[1].model())
    assert not runs[0]._clients["personal"].any()


def test_centaur_fits_the_head_first_and_uploads_the_representation():
    held = network((5, 7), dtype=torch.float64)
    algorithm = Centaur(clip=1e3, local_steps=2, head_steps=3, local_lr=0.3, personal_lr=0.2)
    run = federation(algorithm, held, terms(held, "user"), epsilon=None)
    seen, theta = watched(run), run.model().clone()
    run.round()
    begin = 4 * 5 + 5
    cohort, y = held.cohort(torch.arange(2)), theta.expand(2, 43).clone()
    for step in range(5):
        gradient = held.gradient_sums(cohort, y) / 8.0
        if step < 3:
            y[:, begin:] -= 0.2 * gradient[:, begin:]
        else:
            y[:, :begin] -= 0.3 * gradient[:, :begin]
    torch.testing.assert_close(seen[0][1], y[:, :begin] - theta[:begin])
    torch.testing.assert_close(run._clients["head"], y[:, begin:])
    assert torch.equal(run.model()[begin:], theta[begin:])
    torch.testing.assert_close(run.model()[:begin], y[:, :begin].mean(0))


@pytest.mark.parametrize("name", PERSONAL)
def test_accuracy_is_the_mean_over_clients_of_their_own_models(name):
    held = network()
    run = finish(federation(PERSONAL[name], held, terms(held, "user")))
    own = run.algorithm.personal_models(run.server, run._clients)
    assert own.shape == (5, 43) and len(own.unique(dim=0)) > 3
    wanted = sum(held.accuracy(model) for model in own) / 5
    assert run.accuracy() == pytest.approx(wanted)
    every_other = (held.accuracy(own[i], slice(i % 2, None, 2)) for i in range(5))
    assert run.accuracy(personal_parts=2) == pytest.approx(sum(every_other) / 5)


@pytest.mark.parametrize("name", PERSONAL)
def test_what_is_handed_out_is_made_of_the_means_alone(name):
    held = network()
    run = federation(PERSONAL[name], held, terms(held, "user"))
    means, server = [], type(run.algorithm).server

    class Noting(type(run.algorithm)):
        def server(self, stage, terms, state, seen):
            means.append(seen.mean.clone())
            return server(self, stage, terms, state, seen)

    algorithm = run.algorithm
    run.algorithm = Noting(**vars(algorithm))
    finish(run)
    state = algorithm.server_start(run.terms, held.initial())
    for mean in means:
        length = len(mean)
        state["theta"][:length] += algorithm.lr * mean
    torch.testing.assert_close(run.model(), state["theta"])


@pytest.mark.parametrize("name", PERSONAL)
@pytest.mark.parametrize("view", ["aggregate", "each_upload"])
@pytest.mark.parametrize("kind", ["fixed", "poisson", "shuffled"])
def test_state_that_remembers_rounds_is_refused_where_a_fixed_number_is_drawn_in_secret(
    name, view, kind
):
    held = network((3,) * 6)
    adjacency = "add-remove" if (view, kind) == ("aggregate", "poisson") else "replace-one"
    told = terms(held, "user", view, adjacency=adjacency)
    options = {"sampler": sampler(kind, 6, 2), "accountant": "rdp"}
    if (view, kind) == ("aggregate", "fixed"):
        with pytest.raises(ValueError, match="remembers which rounds they were in"):
            federation(PERSONAL[name], held, told, **options)
    else:
        run = finish(federation(PERSONAL[name], held, told, **options))
        assert run.void is None and 0 < run.epsilon() <= 5.0


@pytest.mark.parametrize("name", PERSONAL)
def test_clients_that_were_not_drawn_keep_what_they_had(name):
    held = network((3,) * 6)
    told = terms(held, "user", "each_upload")
    drawn = sampler("fixed", 6, 2)
    run = federation(PERSONAL[name], held, told, sampler=drawn)
    seen, key = watched(run), next(iter(run._clients))
    before = run._clients[key].clone()
    run.round()
    changed = (run._clients[key] != before).any(1)
    assert changed.nonzero().flatten().tolist() == seen[0][0].tolist()


@pytest.mark.parametrize("name", PERSONAL)
def test_a_client_whose_training_fails_uploads_noise_and_keeps_its_model(name):
    held = network()
    held._x[:7] = torch.nan
    run = federation(PERSONAL[name], held, terms(held, "user"), epsilon=None)
    seen = watched(run)
    key = next(iter(run._clients))
    before = run._clients[key][0].clone()
    finish(run)
    assert torch.equal(run._clients[key][0], before)
    assert not any(uploads[0].any() for _, uploads in seen)


def test_centaur_needs_a_representation_and_users():
    held = problem()
    with pytest.raises(ValueError, match="a module before its last one"):
        federation(Centaur(), held, terms(held, "user"))
    deep = network()
    for algorithm in (Centaur(), PPSGD(), UDPFedAvg()):
        with pytest.raises(ValueError, match="take unit 'user'"):
            federation(algorithm, deep, terms(deep, "record"))
    with pytest.raises(ValueError, match="take unit 'record'"):
        federation(LocalDPSGD(), deep, terms(deep, "user"))


def test_one_model_for_all_has_no_personal_ones():
    with pytest.raises(TypeError, match="one model"):
        UDPFedAvg().personal_models({}, {})


def test_local_training_says_which_problems_have_it():
    held = problem()
    run = federation(UDPFedAvg(lr=1.0), held, replace(terms(held, "user"), layers=held.layers))
    with pytest.raises(TypeError, match="take ModelProblem"):
        run.round()
