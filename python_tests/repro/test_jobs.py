"""Trainings in processes of their own: at once, stopped, failing, and on the clock."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dpkernels.repro import jobs, worker
from dpkernels.repro.dp_kfc import TABLES
from dpkernels.repro.tables import cells
from dpkernels.repro.timing import timed_tasks
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
    replace(broken.options, clip=2.0).write(broken.folder)
    (broken.folder / CHECKPOINT).touch()
    (broken.folder / "log.txt").write_text("of an earlier attempt\n")
    assert repro(tmp_path, *arguments, "--jobs", 2) == 1
    printed = capsys.readouterr()
    assert "failed: MNIST, DP-SGD, epsilon 1, seed 0" in printed.err
    log = broken.folder / "log.txt"
    assert "the table wants 1.0" in printed.err and str(log) in printed.err
    assert log.read_text().startswith("of an earlier attempt\nTraceback")
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
    # The first is finished already. Ctrl-C comes when both long ones train; the last never begins.
    short, never = (task(tmp_path, data_dir, seed) for seed in (0, 1))
    both = [task(tmp_path, data_dir, seed, epochs=1000) for seed in (0, 1)]
    finished, ended = perform(short), []

    def press_ctrl_c(one, outcome):
        ended.append((one, outcome))
        # Not without pauses, which would take the processor from those that are waited for.
        for _ in range(5000):
            if all((one.folder / CHECKPOINT).exists() for one in both):
                raise KeyboardInterrupt
            threading.Event().wait(0.05)

    with pytest.raises(KeyboardInterrupt):
        jobs.run_all([short, *both, never], press_ctrl_c, jobs=2)
    assert ended == [(short, finished)]
    for one in both:
        (attempt,) = attempts_of(one.folder)
        assert attempt["seconds"] > 0  # it was let end, not killed
        assert read(one) is None
    assert not never.folder.exists()


def test_a_training_stops_without_its_command_where_interrupts_are_ignored(
    tmp_path, data_dir, monkeypatch
):
    argument = worker.encoded(task(tmp_path, data_dir), jobs=1, threads=torch.get_num_threads())
    # Whoever holds the other end of its input is gone, before the training has a first step.
    monkeypatch.setattr(worker, "os", SimpleNamespace(read=lambda file, count: b""))
    monkeypatch.setattr(worker, "perform", lambda *_, **__: threading.Event().wait(60))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert worker.main(argument) == worker.STOPPED
    finally:
        signal.signal(signal.SIGINT, before)


def test_whole_trainings_are_timed_alone_beside_opacus(tmp_path, repro, data_dir):
    optional_package("opacus")
    # Processes take seconds to begin: only the last is left for the command.
    changed = {"epochs": 1, "batch_size": 64, "data_dir": str(data_dir)}
    wanted = cells(TABLES["1"], [2.0], ["dp-sgd"])
    *earlier, last = timed_tasks(TABLES["1"], wanted, (), 1, tmp_path / "runs", changed)
    for one in earlier:
        perform(one)
    arguments = ("--epsilon", 2, "--methods", "dp-sgd", "--seeds", 1)
    assert repro(tmp_path, *arguments, "--timing") == 0
    written = content_of(tmp_path)
    timing = {row["row"]: row for row in written["timing"]}
    hooks, ghost = "Opacus' DP-SGD, hooks", "Opacus' DP-SGD, ghost"
    kfac = "Synthetic DP-KFC"
    by_default = f"{kfac}, factors as here by default"
    assert list(timing) == ["DP-SGD", kfac, by_default, hooks, ghost]
    for row in timing.values():
        assert (row["block"], row["epsilon"], row["repeats"]) == ("MNIST", 2, 1)
        # Opacus searches noise until epsilon is within 0.01 of the budget.
        assert 1.99 <= row["epsilon_spent"] <= 2
        assert row["wall_seconds"] > RECORDS / row["samples_per_second"]
    assert last.folder == training_of(tmp_path / "runs" / "timing", "opacus-ghost", 2, "repeat-0")
    (attempt,) = attempts_of(last.folder)
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
