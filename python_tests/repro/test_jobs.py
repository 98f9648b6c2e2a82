"""Trainings in processes of their own: at once, stopped, failing, and on the clock."""

from __future__ import annotations

import os

import pytest

from dpkernels.repro import jobs
from dpkernels.repro.dp_kfc import TABLES
from dpkernels.repro.tables import cells
from dpkernels.repro.trials import perform, read, task_of
from dpkernels.train.outputs import CHECKPOINT
from python_tests.optional_packages import optional_package
from python_tests.repro.files import (
    RECORDS,
    attempts_of,
    content_of,
    grid,
    markdown_of,
    training_of,
)

optional_package("matplotlib")


def task(runs, data_dir, seed=0, epochs=1):
    (cell,) = cells(TABLES["1"], [1.0], ["dp-sgd"])
    changed = {"epochs": epochs, "batch_size": 64, "data_dir": str(data_dir)}
    return task_of(cell, seed, runs, changed)


def test_trainings_at_once_give_what_one_alone_gives_and_a_failure_stops_none(
    tmp_path, repro, data_dir, capsys
):
    arguments = ("--epsilon", 1, "--methods", "dp-sgd")
    broken = task(tmp_path / "runs", data_dir)
    broken.folder.mkdir(parents=True)
    broken.options.write(broken.folder)
    (broken.folder / CHECKPOINT).write_bytes(b"not a checkpoint")
    assert repro(tmp_path, *arguments, "--jobs", 2) == 1
    printed = capsys.readouterr()
    assert "failed: MNIST, DP-SGD, epsilon 1, seed 0" in printed.err
    assert str(broken.folder / "log.txt") in printed.err
    # One line for the training that ended well, whole.
    (line,) = [line for line in printed.out.splitlines() if line.startswith("[")]
    assert "/2] MNIST, DP-SGD, epsilon 1, seed 1: accuracy " in line

    other = read(task(tmp_path / "runs", data_dir, 1))
    (attempt,) = other.attempts
    assert (attempt.jobs, attempt.origin["threads"]) == (2, max(1, jobs.cores() // 2))
    alone = perform(task(tmp_path / "alone", data_dir, 1))
    assert (other.accuracy, other.epsilon) == (alone.accuracy, alone.epsilon)
    # Beside others, speed is nobody's: the table has none.
    (cell,) = content_of(tmp_path)["cells"]
    assert cell["ours"]["accuracies"] == {"1": alone.accuracy}
    assert "samples/s" not in markdown_of(tmp_path)
    assert "samples_per_second" not in str(content_of(tmp_path))


def test_ctrl_c_stops_all_with_their_checkpoints(tmp_path, data_dir):
    # Ctrl-C comes when the short one is at its end; the last never begins.
    long, short = task(tmp_path, data_dir, epochs=1000), task(tmp_path, data_dir, 1)
    never = task(tmp_path, data_dir, 2)
    ended = []

    def press_ctrl_c(one, outcome):
        ended.append((one, outcome))
        while not (long.folder / CHECKPOINT).exists():
            os.sched_yield()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jobs.run_all([long, short, never], press_ctrl_c, jobs=2)
    assert [one for one, _ in ended] == [short]
    assert ended[0][1].accuracy == read(short).accuracy
    (attempt,) = attempts_of(long.folder)
    assert attempt["seconds"] > 0  # it was let end, not killed
    assert read(long) is None and read(never) is None


def test_whole_trainings_are_timed_alone_beside_opacus(tmp_path, repro):
    optional_package("opacus")
    arguments = ("--epsilon", 2, "--methods", "dp-sgd", "--seeds", 1)
    assert repro(tmp_path, *arguments, "--timing") == 0
    written = content_of(tmp_path)
    timing = {row["row"]: row for row in written["timing"]}
    hooks, ghost = "Opacus' DP-SGD, hooks", "Opacus' DP-SGD, ghost"
    assert list(timing) == ["DP-SGD", "Synthetic DP-KFC", hooks, ghost]
    for row in timing.values():
        assert (row["block"], row["epsilon"], row["repeats"]) == ("MNIST", 2, 1)
        # Opacus searches noise until epsilon is within 0.01 of the budget.
        assert 1.99 <= row["epsilon_spent"] <= 2
        assert row["wall_seconds"] > RECORDS / row["samples_per_second"]
    for method in ("dp-sgd", "dp-kfc", "opacus-hooks", "opacus-ghost"):
        training = training_of(tmp_path / "runs" / "timing", method, 2, "repeat-0")
        (attempt,) = attempts_of(training)
        assert (attempt["jobs"], attempt["threads"]) == (1, jobs.cores())
    rows = {row["method"]: row for row in grid(markdown_of(tmp_path), "method | wall-clock")}
    for name in ("hooks", "ghost"):
        ours, theirs = timing["Synthetic DP-KFC"], timing[f"Opacus' DP-SGD, {name}"]
        training = ours["samples_per_second"] / theirs["samples_per_second"]
        whole = theirs["wall_seconds"] / ours["wall_seconds"]
        assert rows["Synthetic DP-KFC"][f"training vs. {name}"] == f"{training:.2f}x"
        assert rows["Synthetic DP-KFC"][f"whole run vs. {name}"] == f"{whole:.2f}x"
    # The cells are not trained by what is timed, and a table without --timing keeps the times.
    assert [cell["ours"] for cell in written["cells"]] == [None]
    assert repro(tmp_path, *arguments) == 0
    assert content_of(tmp_path)["timing"] == written["timing"]
