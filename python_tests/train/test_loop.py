"""What the loop shows, counts and leaves behind, wherever it is stopped."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from dpkernels import cli
from dpkernels.precondition import Kfac
from dpkernels.train import loop, prepared
from dpkernels.train.data import held_out, load
from dpkernels.train.models import build
from dpkernels.whole_file import write_text
from python_tests.train.files import write_adult, write_imdb

pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")

STEPS_OF_EPOCH = 6  # round(400 / 64)


@pytest.fixture
def train(tmp_path):
    """Return the command on a small data set in Adult's format, two epochs, into ``run``."""
    write_adult(tmp_path / "adult-a9a")

    def command(*arguments, output="run"):
        common = ["--data-dir", str(tmp_path), "--output", str(tmp_path / output)]
        if "--resume" not in arguments:
            common += ["--dataset", "adult", "--batch-size", "64", "--epochs", "2", "--seed", "2"]
        return cli.main(["train", *common, *arguments])

    return command


def checkpoint_in(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def weights_in(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def rows_in(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_ctrl_c_in_an_evaluation_takes_no_further_step(tmp_path, train, monkeypatch):
    assert train("--quiet", output="whole") == 0

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return evaluate(*arguments)

    evaluate = loop.evaluate
    with monkeypatch.context() as patched:
        patched.setattr(loop, "evaluate", interrupted)
        assert train("--quiet") == 130
    left = checkpoint_in(tmp_path / "run")
    assert left["run"]["training"]["steps"] == STEPS_OF_EPOCH
    assert [row["step"] for row in rows_in(tmp_path / "run")] == [str(STEPS_OF_EPOCH)]
    assert train("--quiet", "--resume") == 0
    whole, parts = (weights_in(tmp_path / name) for name in ("whole", "run"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    without_clock = [
        [{**row, "samples_per_second": None} for row in rows_in(tmp_path / name)]
        for name in ("whole", "run")
    ]
    assert without_clock[0] == without_clock[1]


def test_ctrl_c_in_the_first_estimate_leaves_nothing_to_resume_and_says_so(
    tmp_path, train, monkeypatch, capsys
):
    def interrupted(kfac):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Kfac, "refresh", interrupted)
        assert train("--quiet", "--method", "dp-kfc") == 130
    assert "stopped before the first step" in capsys.readouterr().err
    assert train("--quiet", "--resume") == 2
    assert "nothing can be resumed; leave --resume out" in capsys.readouterr().err
    # Between the options and the first checkpoint.
    with monkeypatch.context() as patched:
        patched.setattr(loop._State, "save", interrupted)
        assert train("--quiet", "--method", "dp-kfc") == 130
    assert (tmp_path / "run" / "options.json").exists()
    assert train("--quiet", "--resume") == 2
    assert "stopped before its first step; leave --resume out" in capsys.readouterr().err
    assert train("--quiet", "--method", "dp-kfc") == 0


def test_an_interrupted_text_file_is_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    write_text(file, "old")

    def half(path, text):
        with path.open("w") as opened:
            opened.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt):
            write_text(file, "new and long")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    write_text(file, "new")
    assert file.read_text() == "new"


def test_two_processes_may_write_one_text_file(tmp_path, monkeypatch):
    file, plain = tmp_path / "table.md", Path.write_text

    def and_another_process_writes_too(path, text):
        plain(path, text)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", plain)
            patched.setattr(os, "getpid", lambda: -1)
            write_text(file, "of the other")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", and_another_process_writes_too)
        write_text(file, "of the last")
    assert file.read_text() == "of the last" and list(tmp_path.iterdir()) == [file]


def test_the_clock_counts_the_first_estimate_and_all_others(tmp_path, train, monkeypatch):
    now = [0.0]
    refresh = Kfac.refresh

    def of_100_seconds(kfac):
        now[0] += 100
        refresh(kfac)

    def of_1000_seconds(*arguments):
        now[0] += 1000
        return evaluate(*arguments)

    evaluate = loop.evaluate
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (loop, prepared):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Kfac, "refresh", of_100_seconds)
    monkeypatch.setattr(loop, "evaluate", of_1000_seconds)
    assert train("--quiet", "--method", "dp-kfc", "--refresh-every", "5") == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    # Before the first step, after the fifth and after the tenth of twelve; evaluation is left out.
    assert report["training_seconds"] == 300
    assert report["samples_per_second"] == 64 * 2 * STEPS_OF_EPOCH / 300
    assert "300.0 s of training" in (tmp_path / "run" / "report.txt").read_text()


def test_the_bar_shows_loss_accuracy_epsilon_and_speed_of_every_step(train, monkeypatch, capsys):
    shown = []

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(mininterval=0, **options)

        def set_postfix(self, figures, refresh):
            shown.append(figures)

    monkeypatch.setattr(loop, "tqdm", Bar)
    assert train("--epsilon", "3") == 0
    assert len(shown) == 2 * STEPS_OF_EPOCH
    names = ["loss (not private)", "accuracy", "epsilon", "samples/s"]
    assert all(list(figures) == names for figures in shown)
    spent = [float(figures["epsilon"]) for figures in shown]
    assert spent == sorted(spent) and 0 < spent[0] < spent[-1] <= 3
    assert [figures["accuracy"] == "-" for figures in shown] == [True] * 6 + [False] * 6
    assert "not covered by epsilon: training losses" in capsys.readouterr().out


def test_losses_are_called_not_private_where_they_are_written(tmp_path, train):
    assert train("--quiet") == 0
    first, _ = rows_in(tmp_path / "run")
    assert float(first["loss_not_private"]) > 0 and "loss" not in first


def test_accuracy_on_held_out_records_is_said_to_be_on_them_and_not_covered(
    tmp_path, train, capsys
):
    assert train("--quiet", "--validation", "100") == 0
    said = capsys.readouterr().out
    assert "on held-out records, epsilon" in said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert "100 training records, which were left out" in report["data"]
    for text in (said, report["not_covered"]):
        assert "not covered by epsilon: accuracy on held-out records, training losses" in text
    (tested,) = re.findall("taken for public: .*", (tmp_path / "run" / "report.txt").read_text())
    assert tested == "taken for public: the number of records"
    assert "accuracy_not_private" in rows_in(tmp_path / "run")[0]
    # 300 records are left to draw 64 of, five times an epoch.
    assert report["privacy"]["steps"] == 2 * 5
    data = held_out(load("adult", str(tmp_path)), 100)
    model = build("logistic", data.shape, data.classes)
    model.load_state_dict(weights_in(tmp_path / "run"))
    assert report["accuracy"] == loop.evaluate(model, data.test)


def test_epsilon_in_the_table_is_what_was_spent_and_not_what_was_asked_for(
    tmp_path, train, monkeypatch
):
    calibrate = prepared.calibrate_noise_multiplier
    monkeypatch.setattr(
        prepared,
        "calibrate_noise_multiplier",
        lambda *arguments, **options: calibrate(*arguments, **options) / 2,
    )
    assert train("--quiet", "--epsilon", "3") == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert float(rows_in(tmp_path / "run")[-1]["epsilon"]) == report["privacy"]["epsilon"] > 3


@pytest.mark.parametrize("method", ["dp-sgd", "dp-kfc"])
def test_bert_is_trained_and_resumed_by_the_same_command(tmp_path, train, monkeypatch, method):
    write_imdb(tmp_path / "imdb")
    arguments = ["--dataset", "imdb", "--model", "bert", "--method", method, "--quiet"]
    arguments += ["--batch-size", "8"]
    if method == "dp-kfc":
        arguments += ["--probe-batches", "1", "--refresh-every", "4"]
    assert train(*arguments, output="whole") == 0
    losses = []

    def interrupted(*given, **options):
        losses.append(1)
        if len(losses) == 2:
            signal.raise_signal(signal.SIGINT)
        return torch.nn.functional.cross_entropy(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "cross_entropy", interrupted)
        assert train(*arguments) == 130
    assert train("--quiet", "--resume") == 0
    whole, parts = (weights_in(tmp_path / name) for name in ("whole", "run"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["privacy"]["epsilon"] <= 1 and "words of a text, hashed" in report["data"]
    assert ("tokens" in (report["preconditioner"] or "")) is (method == "dp-kfc")
