"""Epsilon comes from statements alone, keeps to the budget, and is amplified where it may be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dpkernels.federated import Centred, FedFC, FedGD, FedNew, Scaffold, Terms
from dpkernels.federated.release import Release, calibrate
from dpkernels.privacy import make_accountant
from dpkernels.privacy.mechanism import EveryRecord, Poisson, Shuffled, WithoutReplacement
from python_tests.federated.cases import (
    ALGORITHMS,
    SERVED,
    VIEWS,
    federation,
    finish,
    problem,
    problem_for,
    quietly,
    sampler,
    terms,
)

TARGET, DELTA = 5.0, 1e-3


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("name", "unit"), SERVED)
def test_all_rounds_together_keep_to_the_budget_or_have_no_epsilon(name, unit, view):
    held = problem_for(ALGORITHMS[name])
    run = federation(ALGORITHMS[name], held, terms(held, unit, view))
    spent = []
    while not run.finished:
        run.round()
        spent.append(run.epsilon())
    if run.void is not None:
        assert spent == [None] * run.rounds_planned
        assert 0.99 * TARGET < run.claimed_epsilon() <= TARGET
        return
    assert spent == sorted(spent) and 0.99 * TARGET < spent[-1] <= TARGET
    assert run.claimed_epsilon() == run.epsilon()
    # Nothing but the statements of the stages, once a round.
    assert run.accountant.history == [(run.statement(stage), stage.rounds) for stage in run.stages]


VOID = [
    ("fednew xi", "record", "each_upload"),
    ("fednew xi", "record", "aggregate"),
    ("fednew cg uploaded", "record", "aggregate"),
    ("fednew cg uploaded", "user", "aggregate"),
    ("fednew exact clean", "record", "each_upload"),
    ("scaffold uploaded", "record", "aggregate"),
    ("scaffold uploaded", "user", "aggregate"),
    ("scaffold none", "record", "aggregate"),
    ("centred fednew uploaded", "record", "aggregate"),
    ("fedceo own", "user", "aggregate"),
    ("fedceo slot", "user", "aggregate"),
    ("fedceo own", "record", "aggregate"),
    ("fedceo mean", "record", "aggregate"),
    ("local-dpsgd", "record", "aggregate"),
]
SOUND = [
    ("fednew cg uploaded", "record", "each_upload"),
    ("fednew exact clean radius", "record", "aggregate"),
    ("fednew exact clean", "user", "aggregate"),
    ("fednew cg none", "record", "aggregate"),
    ("scaffold none", "user", "aggregate"),
    ("scaffold clean", "user", "aggregate"),
    ("scaffold uploaded", "record", "each_upload"),
    ("centred fednew uploaded", "record", "each_upload"),
    ("fedceo mean", "user", "aggregate"),
    ("fedceo mean", "record", "each_upload"),
    ("fedceo own", "user", "each_upload"),
    ("fedceo slot", "user", "each_upload"),
    ("fedceo slot", "record", "each_upload"),
    ("udp-fedavg spectral sum", "user", "aggregate"),
    ("udp-fedavg layer filtered", "user", "each_upload"),
    ("local-dpsgd", "record", "each_upload"),
    ("ppsgd", "user", "aggregate"),
    ("centaur", "user", "aggregate"),
]


@pytest.mark.parametrize(("name", "unit", "view"), VOID + SOUND)
def test_what_the_papers_claim_without_proof_is_void_and_the_rest_is_not(name, unit, view):
    held = problem()
    told = terms(held, unit, view)
    assert (ALGORITHMS[name].void(told) is not None) == ((name, unit, view) in VOID)


def test_without_noise_there_is_no_epsilon():
    held = problem()
    run = federation(FedGD(), held, terms(held), epsilon=None)
    run.round()
    assert run.epsilon() is None and run.claimed_epsilon() is None


def test_rounds_beyond_the_plan_are_refused():
    held = problem()
    run = finish(federation(Centred(FedGD()), held, terms(held)))
    assert run.rounds_planned == 4
    state = run.state_dict()
    with pytest.raises(RuntimeError, match="all 4 rounds"):
        run.round()
    assert run.rounds_begun == 4 and run.epsilon() <= TARGET
    again = federation(Centred(FedGD()), held, terms(held))
    quietly(again.load_state_dict, state)
    with pytest.raises(RuntimeError, match="all 4 rounds"):
        again.round()


def multiplier(held, unit, view, adjacency, *, kind=None, size=3, rate=1.0, rounds=3, **options):
    drawn = None if kind is None else sampler(kind, held.clients, size)
    told = terms(held, unit, view, adjacency=adjacency, rounds=rounds)
    chosen = {"sampler": drawn, "record_rate": rate, "accountant": "pld"} | options
    run = federation(FedGD(), held, told, **chosen)
    finish(run)
    assert run.epsilon() <= TARGET
    return run.multipliers["gradient"]


@pytest.mark.parametrize(
    ("unit", "view", "adjacency", "kind", "amplified"),
    [
        ("user", "aggregate", "add-remove", "poisson", True),
        ("user", "aggregate", "replace-one", "fixed", True),
        ("user", "each_upload", "replace-one", "poisson", False),
        ("user", "each_upload", "replace-one", "fixed", False),
        ("record", "aggregate", "add-remove", "poisson", False),
        ("record", "aggregate", "replace-one", "fixed", False),
        ("record", "each_upload", "add-remove", "poisson", False),
        ("record", "each_upload", "replace-one", "fixed", False),
    ],
)
def test_drawing_clients_amplifies_for_users_in_a_sum_only(unit, view, adjacency, kind, amplified):
    held = problem((3,) * 30)
    with_all = multiplier(held, unit, view, adjacency)
    drawn = multiplier(held, unit, view, adjacency, kind=kind)
    if amplified:
        assert drawn < 0.8 * with_all
    else:
        assert drawn == pytest.approx(with_all, rel=1e-3)


@pytest.mark.parametrize("view", VIEWS)
def test_drawing_records_amplifies_for_records_only(view):
    held = problem((3,) * 5)
    whole = multiplier(held, "record", view, "add-remove")
    assert multiplier(held, "record", view, "add-remove", rate=0.1) < 0.8 * whole
    of_users = multiplier(held, "user", view, "replace-one")
    drawn = multiplier(held, "user", view, "replace-one", rate=0.1)
    assert drawn == pytest.approx(of_users, rel=1e-3)


@pytest.mark.parametrize(("unit", "view"), [("user", "aggregate"), ("record", "each_upload")])
def test_a_shuffled_epoch_of_cohorts_counts_as_one_round_of_all(unit, view):
    held = problem((3,) * 6)
    shuffled = multiplier(held, unit, view, "replace-one", kind="shuffled", size=2, rounds=6)
    # calibrate takes one plan of 6 rounds for sqrt(6) of noise: epochs make it 2 releases.
    two = multiplier(held, unit, view, "replace-one", rounds=2)
    assert shuffled == pytest.approx(two, rel=1e-3)


@pytest.mark.parametrize("kind", [None, "shuffled"])
@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_local_steps_share_one_draw_and_are_accounted_so(kind, rate):
    held = problem((3,) * 4)
    adjacency = "add-remove" if rate < 1 else "replace-one"
    told = terms(held, "record", "each_upload", adjacency=adjacency, rounds=1)
    run = federation(
        Scaffold(control="none", local_steps=4),
        held,
        told,
        sampler=None if kind is None else sampler(kind, 4, 1),
        record_rate=rate,
        accountant="pld",
    )
    run.round()
    query = run.statement(run.stages[0]).queries[0]
    # Four releases on one draw are one release with half the noise.
    half = replace(query, noise_std=query.noise_std / 2)
    one = replace(run.statement(run.stages[0]), queries=(half,))
    alone = make_accountant("pld")
    alone.compose(one)
    assert run.epsilon() == pytest.approx(alone.epsilon(DELTA), rel=1e-6)
    assert 0.98 * TARGET < alone.epsilon(DELTA) <= TARGET


def test_duals_that_remember_records_take_every_record_in_every_round():
    held = problem()
    told = terms(held, adjacency="add-remove")
    clean = FedNew(hessian="none", dual="clean", radius=1.0)
    with pytest.raises(ValueError, match="remembers a record"):
        federation(clean, held, told, record_rate=0.5, accountant="pld")
    federation(clean, held, told)
    federation(FedNew(hessian="none"), held, told, record_rate=0.5, accountant="pld")
    users = replace(told, unit="user")
    federation(FedNew(hessian="none", dual="clean"), held, users, record_rate=0.5)


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
@pytest.mark.parametrize(
    "algorithm",
    [FedNew(dual="uploaded"), FedNew(dual="clean"), Scaffold(control="uploaded")],
    ids=str,
)
def test_state_that_needs_every_client_refuses_drawn_ones(algorithm, kind):
    held = problem()
    told = terms(held, "user", adjacency="add-remove" if kind == "poisson" else "replace-one")
    with pytest.raises(ValueError, match=r"needs (every client|the mean of every round)"):
        federation(algorithm, held, told, sampler=sampler(kind, held.clients, 2))


@pytest.mark.parametrize("steps", [1, 5])
def test_uploads_made_of_noisy_releases_refuse_noise_of_the_sum(steps):
    # An upload of local_lr times the release would move local_lr times as far as is stated.
    held = problem()
    told = terms(held, adjacency="add-remove")
    drawn = sampler("poisson", held.clients, 2)
    local = Scaffold(control="none", local_steps=steps, local_lr=20.0)
    with pytest.raises(ValueError, match="make of their noisy releases"):
        federation(local, held, told, sampler=drawn, accountant="pld")


def test_an_upload_other_than_the_release_is_refused():
    class Louder(FedGD):
        def client(self, visit):
            upload, state = super().client(visit)
            return 20 * upload, state

    held = problem()
    run = federation(Louder(), held, terms(held))
    with pytest.raises(RuntimeError, match="must upload what noisy returned"):
        run.round()
    assert run.rounds_released == 0


def test_what_cannot_be_stated_is_refused_before_the_first_round():
    held = problem()
    told = terms(held, "user", "each_upload", adjacency="add-remove")
    with pytest.raises(ValueError, match="replace-one"):
        federation(FedGD(), held, told, epsilon=None)


def test_stages_of_one_name_are_refused():
    held = problem()
    twice = Centred(Centred(FedGD(), bias=0.0), bias=0.0)
    with pytest.raises(ValueError, match="names of the stages"):
        federation(twice, held, terms(held))


@pytest.mark.parametrize(
    "wrong", [{"unit": "client"}, {"view": "sum"}, {"adjacency": "edit"}, {"records": math.inf}]
)
def test_terms_of_another_kind_are_refused(wrong):
    good = terms(problem())
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Terms(**{**vars(good), **wrong})


def test_a_problem_of_another_shape_or_number_of_clients_is_refused():
    held = problem()
    good = terms(held)
    for wrong in (replace(good, shape=(3, 5)), replace(good, clients=4)):
        with pytest.raises(ValueError, match="terms must have the"):
            federation(FedGD(), held, wrong)


def test_a_statement_says_what_is_drawn_and_who_sees_it():
    told = terms(problem())
    stage = FedGD().stages(told)[0]
    cases = [
        (EveryRecord(), 1.0, ("clients", EveryRecord())),
        (WithoutReplacement(2, 5), 1.0, ("clients", WithoutReplacement(2, 5))),
        (Shuffled(2), 1.0, ("clients", Shuffled(2))),
    ]
    for sampling, rate, wanted in cases:
        statement = Release(told, sampling, 2, record_rate=rate).statement(stage, 1.0)
        assert (statement.sampled, statement.sampling) == wanted
        assert (statement.unit, statement.view) == ("record", "aggregate")
        assert statement.queries[0].sensitivity == 2 * stage.query.sensitivity
    joining = replace(told, adjacency="add-remove")
    statement = Release(joining, EveryRecord(), 5, record_rate=0.5).statement(stage, 1.0)
    assert (statement.sampled, statement.sampling) == ("records", Poisson(0.5))
    assert statement.queries[0].sensitivity == stage.query.sensitivity


def test_each_stage_has_its_share_of_the_budget():
    held = problem()
    told = terms(held)
    algorithm = Centred(FedFC(covariance_share=0.25), share=0.2)
    stages = algorithm.stages(told)
    release = Release(told, EveryRecord(), held.clients)
    noise = calibrate(release, stages, 1.0, 1e-5, "gaussian")
    spent = {s.name: s.rounds / noise[s.name] ** 2 for s in stages}
    total = sum(spent.values())
    shares = {name: value / total for name, value in spent.items()}
    assert shares == pytest.approx({"mean": 0.2, "covariance": 0.2, "gradient": 0.6})
