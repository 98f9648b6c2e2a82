"""A run that is really killed, again and again, and resumed."""

from __future__ import annotations

import json
import multiprocessing
import signal
import warnings

import pytest
import torch

from python_tests.run.training import PLACES, STEPS, made_to_die, main, train

# Killed in every place, at the first step, in the middle, and at the last.
DEATHS = [
    (0, "in save"),
    (2, "after backward"),
    (4, "after step"),
    (7, "after save"),
    (9, "in save"),
]


# Seed, and whether batches are shuffled.
KINDS = {
    "seed": (7, False),
    "entropy": (None, False),
    "shuffled, seed": (7, True),
    "shuffled, entropy": (None, True),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def killed(request, tmp_path_factory):
    """Return the run that got to the end, where noise was drawn, and what kind it is."""
    folder = tmp_path_factory.mktemp("killed")
    checkpoint, log = folder / "run.pt", folder / "log"
    # A server that has imported everything, and of which every process is a fork. Optimizers import
    # torch._dynamo when they are made.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["python_tests.run.training", "torch._dynamo"])
    for step, place in [*DEATHS, (-1, "")]:
        arguments = (str(checkpoint), str(log), *request.param, step, place)
        process = context.Process(target=main, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == (0 if step < 0 else -signal.SIGKILL)
    run, scheduler = made_to_die(*request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extra = run.load(checkpoint, scheduler=scheduler)
    assert extra == {"step": STEPS - 1}
    draws = [json.loads(line) for line in log.read_text().splitlines()]
    assert [file.name for file in folder.glob(".*")] == []
    assert {file.name for file in folder.iterdir()} == {"run.pt", "log"}
    return run, draws, request.param


def test_the_deaths_are_in_every_place():
    assert {place for _, place in DEATHS} == set(PLACES)


def test_a_killed_run_ends_with_the_epsilon_of_one_that_was_not(killed):
    run, _, (_, shuffled) = killed
    whole, scheduler = made_to_die(5, shuffled)
    train(whole, scheduler, STEPS)
    assert run.training.steps == run.accountant.steps == STEPS
    assert whole.accountant.steps == STEPS
    assert run.epsilon(1e-5) == whole.epsilon(1e-5) > 0


def test_noise_is_never_used_twice_by_a_killed_run(killed):
    _, draws, (seed, _) = killed
    assert len(draws) > STEPS  # some steps were lost and taken again
    if seed is not None:
        # From a fixed seed a step that was lost is repeated as it was: same samples, same noise.
        assert len({tuple(pair) for _, *pair in draws}) == STEPS
        assert len({(step, *pair) for step, *pair in draws}) == STEPS
        return
    assert len({tuple(pair) for _, *pair in draws}) == len(draws)
    assert len({key for _, key, _ in draws}) == len(DEATHS) + 1


def test_a_killed_run_from_a_seed_ends_bit_for_bit_like_one_that_was_not(killed):
    run, _, (seed, shuffled) = killed
    if seed is None:
        pytest.skip("noise and samples from the operating system differ, as they should")
    whole, scheduler = made_to_die(seed, shuffled)
    train(whole, scheduler, STEPS)
    assert whole.training.sensitivity == run.training.sensitivity
    for wanted, got in zip(
        whole.training.model.parameters(), run.training.model.parameters(), strict=True
    ):
        assert torch.equal(wanted, got)
