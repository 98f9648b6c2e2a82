"""A federation that is saved in the middle, or killed in a round, and resumed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from dpkernels.federated import Message
from dpkernels.federated.journal import Journal
from python_tests.federated.cases import (
    ALGORITHMS,
    SERVED,
    UNITS,
    federation,
    finish,
    problem_for,
    quietly,
    sampler,
    terms,
    watched,
)

COUNTS = (4, 0, 5, 3, 6, 2)


def made(name="fednew exact clean radius", unit="record", *, seed=1, kind=None, **options):
    held = problem_for(ALGORITHMS[name], COUNTS)
    adjacency = "add-remove" if kind == "poisson" or "record_rate" in options else "replace-one"
    told = terms(held, unit, options.pop("view", "aggregate"), rounds=4, adjacency=adjacency)
    if kind is not None:
        options["sampler"] = sampler(kind, held.clients, 2, seed=seed)
    if kind is not None or "record_rate" in options:
        options["accountant"] = "pld"
    return federation(ALGORITHMS[name], held, told, seed=seed, **options)


def everything(run):
    state = run.state_dict()
    state.pop("seconds")
    return state


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("name", "unit"), SERVED)
def test_a_seeded_run_resumes_bit_for_bit(name, unit, rounds, tmp_path):
    whole, first, second = (made(name, unit) for _ in range(3))
    finish(whole)
    for _ in range(rounds):
        first.round()
    first.save(tmp_path / "run.pt")
    quietly(second.load, tmp_path / "run.pt")
    assert_same(everything(first), everything(second))
    finish(second)
    assert_same(everything(whole), everything(second))
    assert second.accuracy() == whole.accuracy()


@pytest.mark.parametrize(
    ("unit", "options"),
    [
        *((unit, {"kind": kind}) for unit in UNITS for kind in ("fixed", "shuffled", "poisson")),
        ("record", {"record_rate": 0.5, "view": "each_upload"}),
    ],
    ids=str,
)
def test_draws_resume_bit_for_bit(options, unit, tmp_path):
    whole, first, second = (made("centred fedgd", unit, **options) for _ in range(3))
    finish(whole)
    for _ in range(2):
        first.round()
    first.save(tmp_path / "run.pt")
    quietly(second.load, tmp_path / "run.pt")
    assert_same(everything(whole), everything(finish(second)))


def test_a_lost_cohort_of_a_shuffled_epoch_is_asked_again_after_a_restart():
    asked = []

    def lossy(index, ids, uploads):
        asked.append(ids.tolist())
        if index == 2:
            return []
        return [Message(int(i), index, values) for i, values in zip(ids, uploads, strict=True)]

    first = made("fedgd", kind="shuffled", seed=None, transport=lossy)
    second = made("fedgd", kind="shuffled", seed=None, transport=lossy)
    first.round()
    assert not first.round().released
    second.load_state_dict(first.state_dict())
    second.round()
    second.round()
    assert asked[1] == asked[2]
    assert sorted([*asked[0], *asked[2], *asked[3]]) == list(range(len(COUNTS)))


@pytest.mark.parametrize(
    "name", ["fedgd", "fednew exact clean radius", "scaffold uploaded", "centred fednew uploaded"]
)
def test_without_a_seed_epsilon_goes_on_and_noise_is_never_repeated(name):
    first, second = (made(name, seed=None, view="each_upload") for _ in range(2))
    drawn = [watched(first), watched(second)]
    pairs = []
    for run in (first, second):
        note_pairs(run, pairs)
    first.round()
    state = first.state_dict()
    assert state["keys"] == {"seed": None, "counters": None}
    finish(first)
    second.load_state_dict(state)
    finish(second)
    assert second.epsilon() == first.epsilon()
    assert second.accountant.history == first.accountant.history
    assert len(set(pairs)) == len(pairs) == sum(len(rows) for seen in drawn for _, rows in seen)
    for (_, one), (_, other) in zip(drawn[0][1:], drawn[1], strict=True):
        assert (one != other).any(1).any()


def note_pairs(run, pairs):
    """Add every (key, counter) that the clients' noise is drawn from."""
    reserve = run._keys.reserve

    def noting(rows, count=1):
        keys, counters = reserve(rows, count)
        pairs.extend(zip(keys.tolist(), counters.tolist(), strict=True))
        return keys, counters

    run._keys.reserve = noting


def test_state_does_not_change_after_it_was_taken():
    run = made("fednew exact uploaded", view="each_upload")
    run.round()
    state = run.state_dict()
    before = {key: value.clone() for key, value in state["clients"].items()}
    theta = state["server"]["theta"].clone()
    finish(run)
    assert torch.equal(state["server"]["theta"], theta)
    for key, value in before.items():
        assert torch.equal(state["clients"][key], value)
        assert not torch.equal(run.state_dict()["clients"][key], value)


@pytest.mark.parametrize(
    "other",
    [
        {"name": "fedgd momentum"},
        {"unit": "user"},
        {"view": "each_upload"},
        {"epsilon": 2.0},
        {"kind": "fixed"},
        {"record_rate": 0.5},
    ],
    ids=str,
)
def test_the_state_of_another_federation_is_refused(other):
    run = made(**{"name": "fedgd"} | other)
    before = everything(run)
    state = made("fedgd")
    state.round()
    with pytest.raises(ValueError, match="make the federation as it was"):
        quietly(run.load_state_dict, state.state_dict())
    assert_same(before, everything(run))


def test_going_back_to_an_earlier_state_keeps_what_was_spent_since():
    run = made("fedgd", seed=None)
    run.round()
    state = run.state_dict()
    run.round()
    spent = run.epsilon()
    run.load_state_dict(state)
    assert run.rounds_released == 1
    assert run.epsilon() == spent


PLACES = ("in the clients' step", "after the sum", "in save")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train(checkpoint: str, log: str, seed: int | None, death: tuple[int, str] | None) -> None:
    """Run on from ``checkpoint``, if it is there, to the end or until death in a round."""
    run = made(seed=seed)
    if Path(checkpoint).exists():
        quietly(run.load, checkpoint)
    pairs = []
    note_pairs(run, pairs)
    step, opened = run._clients_step, run._open

    def dying_step(*arguments):
        found = step(*arguments)
        with open(log, "a") as file:
            print(json.dumps([run.rounds_released, pairs[-len(COUNTS) :]]), file=file)
        if death == (run.rounds_released, PLACES[0]):
            die()
        return found

    def dying_open(*arguments):
        opened(*arguments)
        if death == (run.rounds_released, PLACES[1]):
            die()

    run._clients_step, run._open = dying_step, dying_open
    while not run.finished:
        run.round()
        if death == (run.rounds_released, PLACES[2]):
            die_while_writing()
        run.save(checkpoint)


def die_while_writing():
    whole = torch.save

    def half(state, target):
        whole(state, target)
        target.truncate(target.tell() // 2)
        target.flush()
        die()

    torch.save = half


@pytest.mark.parametrize("seed", [1, None], ids=["seed", "entropy"])
def test_a_run_that_is_killed_in_its_rounds_ends_like_one_that_was_not(seed, tmp_path):
    checkpoint, log = tmp_path / "run.pt", tmp_path / "log"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["python_tests.federated.test_resume"])
    deaths = [(0, PLACES[0]), (1, PLACES[1]), (2, PLACES[2]), (2, PLACES[0]), None]
    for death in deaths:
        process = context.Process(target=train, args=(str(checkpoint), str(log), seed, death))
        process.start()
        process.join()
        assert process.exitcode == (0 if death is None else -signal.SIGKILL)
    run = made(seed=seed)
    quietly(run.load, checkpoint)
    assert run.finished and {file.name for file in tmp_path.iterdir()} == {"run.pt", "log"}
    whole = finish(made(seed=seed))
    assert run.epsilon() == whole.epsilon() <= 5.0
    rounds = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rounds) > whole.rounds_released  # some were lost and run again
    pairs = [(index, *pair) for index, row in rounds for pair in row]
    if seed is None:
        assert len({pair[1:] for pair in pairs}) == len(pairs)
        return
    # From a seed, a round that was lost is repeated as it was.
    assert len(set(pairs)) == whole.rounds_released * len(COUNTS)
    assert_same(everything(run), everything(whole))


@pytest.mark.parametrize("view", ["each_upload", "aggregate"])
def test_rounds_that_were_seen_after_the_checkpoint_count_and_the_budget_holds(view, tmp_path):
    def begun():
        return made("fedgd", seed=None, view=view, journal=tmp_path / "rounds.jsonl")

    killed = begun()
    killed.round()
    state = killed.state_dict()
    killed.round()
    killed.round()
    resumed = begun()
    resumed.load_state_dict(state)
    assert resumed.epsilon() == killed.epsilon()
    assert resumed.rounds_begun == 3
    # Of four rounds three were seen, so that one is left.
    assert resumed.rounds_planned - resumed.rounds_released == 1
    finish(resumed)
    whole = finish(made("fedgd", seed=None, view=view))
    assert resumed.epsilon() == whole.epsilon()
    # In the process that saw them they are counted already.
    killed.load_state_dict(state)
    assert killed.epsilon() == whole.epsilon()
    # What was lost stays counted after the next checkpoint, too.
    again = begun()
    again.load_state_dict(resumed.state_dict())
    assert again.finished and again.epsilon() == whole.epsilon()


def test_half_a_line_of_the_journal_is_a_round_that_nobody_saw(tmp_path):
    journal = Journal(tmp_path / "rounds.jsonl")
    assert journal.beyond(0) == []
    journal.note(1, "gradient")
    journal.note(2, "gradient")
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write("[3, ")
    assert journal.beyond(0) == [(1, "gradient"), (2, "gradient")]
    assert journal.beyond(1) == [(2, "gradient")]
