"""``dpkernels repro`` from its arguments to its files, on small files in MNIST's format."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch

from dpkernels.train import loop
from python_tests.optional_packages import optional_package
from python_tests.repro.files import (
    STEPS,
    attempts_of,
    content_of,
    grid,
    markdown_of,
    training_of,
    written_to,
)

optional_package("matplotlib")

TWO_METHODS = ("--methods", "dp-sgd", "dp-adambc")


@pytest.fixture(scope="module")
def finished(repro, tmp_path_factory):
    """Return the folder of a small table that was trained without disturbance."""
    folder = tmp_path_factory.mktemp("finished")
    assert repro(folder, "--epsilon", 2, 1, *TWO_METHODS, "disk") == 0
    return folder


def test_ours_is_the_mean_and_spread_of_the_trainings(finished):
    cells = content_of(finished)["cells"]
    assert len(cells) == 6
    for cell in cells:
        seed_0 = training_of(finished / "runs", cell["method"], cell["epsilon"])
        trainings = [seed_0, seed_0.with_name("seed-1")]
        reports = [json.loads((one / "report.json").read_text()) for one in trainings]
        a, b = (100 * report["accuracy"] for report in reports)
        assert cell["ours"]["seeds"] == 2
        assert cell["ours"]["mean"] == pytest.approx((a + b) / 2)
        # Of two numbers, with n - 1: their distance over the root of 2.
        assert cell["ours"]["spread"] == pytest.approx(abs(a - b) / math.sqrt(2))
        assert cell["ours"]["epsilon"] == reports[0]["privacy"]["epsilon"] <= cell["epsilon"]
        assert reports[0]["options"]["seed"] == 0 and reports[1]["options"]["seed"] == 1
        assert cell["ours"]["accuracies"] == {"0": a, "1": b}


def test_differences_in_markdown_are_those_of_its_columns(finished):
    rows = grid(markdown_of(finished), "method | epsilon")
    assert [(row["method"], row["epsilon"]) for row in rows] == [
        (method, epsilon) for method in ("DP-SGD", "DiSK", "DP-AdamBC") for epsilon in ("1", "2")
    ]
    for row in rows:
        paper, ours = (float(row[name].split(" ± ")[0]) for name in ("paper", "ours"))
        assert row["difference"] == f"{ours - paper:+.2f}"
        assert 0.98 * float(row["epsilon"]) < float(row["epsilon spent"]) <= float(row["epsilon"])


def test_the_table_says_how_it_was_made_and_names_no_folder(finished, data_dir):
    text = markdown_of(finished)
    assert "Poisson sampling" in text and "Not the table's settings: epochs = 1" in text
    assert "Data: normalised by published constants." in text
    assert "batch_size 64, epochs 1" in text and "Seeds are fixed" in text
    written = content_of(finished)
    assert written["command"] == (
        "dpkernels repro dp-kfc --table 1 --epsilon 2 1 --methods dp-sgd dp-adambc disk "
        "--seeds 2 --jobs 1 --epochs 1 --batch-size 64"
    )
    assert written["command"] in text
    (origin,) = written["trained_by"]
    assert origin["pieces"] == 12 and origin["jobs"] == 1
    assert origin["threads"] == torch.get_num_threads() and origin["cpu"] in text
    assert origin["versions"]["torch"] == torch.__version__
    assert {"commit", "dirty", "cores"} < origin.keys() and origin["commit"] in text
    for folder in (finished, data_dir):
        assert str(folder) not in text + json.dumps(written)
    picture = written_to(finished, "png").read_bytes()
    assert picture.startswith(b"\x89PNG")


class Losses:
    """Counts losses, one a step, and presses Ctrl-C in that of one step, if asked to."""

    def __init__(self, interrupted=None):
        self.count, self.interrupted = 0, interrupted

    def __call__(self, *arguments, **options):
        self.count += 1
        if self.count == self.interrupted:
            signal.raise_signal(signal.SIGINT)
        return torch.nn.functional.cross_entropy(*arguments, **options)


# Of 4 trainings of 5 steps, in the second: not before its end, and after some of it.
@pytest.mark.parametrize("step", [STEPS + 1, STEPS + 3])
def test_an_interrupted_table_ends_as_an_undisturbed_one(
    tmp_path, repro, finished, monkeypatch, capsys, step
):
    arguments = (tmp_path, "--epsilon", 1, *TWO_METHODS)
    monkeypatch.setattr(loop, "cross_entropy", Losses(step))
    assert repro(*arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    first, second = content_of(tmp_path)["cells"]
    assert first["ours"]["seeds"] == 1 and second["ours"] is None
    assert "| not yet run |" in markdown_of(tmp_path)

    losses = Losses()
    monkeypatch.setattr(loop, "cross_entropy", losses)
    assert repro(*arguments) == 0
    assert losses.count == 4 * STEPS - step
    whole = [
        cell
        for cell in content_of(finished)["cells"]
        if cell["epsilon"] == 1 and cell["method"] in TWO_METHODS
    ]
    assert content_of(tmp_path)["cells"] == whole

    attempts = attempts_of(training_of(tmp_path / "runs", "dp-adambc"))
    assert len(attempts) == 2 and all(attempt["seconds"] > 0 for attempt in attempts)


def test_a_killed_training_is_gone_on_with_and_leaves_its_commit(tmp_path, repro, monkeypatch):
    """What a kill in the middle of the last write leaves, which no handler sees."""
    arguments = (tmp_path, "--epsilon", 1, "--methods", "dp-sgd")
    assert repro(*arguments) == 0
    before = content_of(tmp_path)["cells"]
    training = training_of(tmp_path / "runs", "dp-sgd")
    report = (training / "report.json").read_text()
    (training / "report.json").write_text(report[:40])
    (killed,) = attempts_of(training)
    killed |= {"seconds": None, "others": None, "commit": "of-the-killed-one"}
    (training / "attempts.json").write_text(json.dumps([killed]))
    losses = Losses()
    monkeypatch.setattr(loop, "cross_entropy", losses)
    assert repro(*arguments) == 0
    assert losses.count == 0  # its checkpoint was of the last step
    assert content_of(tmp_path)["cells"] == before
    assert (
        json.loads((training / "report.json").read_text())["accuracy"]
        == (json.loads(report)["accuracy"])
    )
    commits = [origin["commit"] for origin in content_of(tmp_path)["trained_by"]]
    assert "of-the-killed-one" in commits and len(commits) == 2


def test_the_record_of_an_attempt_is_there_before_its_first_step(tmp_path, repro, monkeypatch):
    found = []

    def look(*arguments, **options):
        found.append(attempts_of(training_of(tmp_path / "runs", "dp-sgd", part="seed-0")))
        return torch.nn.functional.cross_entropy(*arguments, **options)

    monkeypatch.setattr(loop, "cross_entropy", look)
    assert repro(tmp_path, "--epsilon", 1, "--methods", "dp-sgd", "--seeds", 1) == 0
    ((first,), *_) = found
    assert first["seconds"] is None and first["commit"] and first["jobs"] == 1


def test_another_table_reads_what_is_trained_already(finished, repro, monkeypatch):
    losses = Losses()
    monkeypatch.setattr(loop, "cross_entropy", losses)
    assert repro(finished, "--epsilon", 1, *TWO_METHODS, table=6) == 0
    assert losses.count == 0
    both = [content_of(finished, table)["cells"] for table in (1, 6)]
    assert both[0] == both[1]


def test_a_table_keeps_what_is_finished_whatever_is_asked_for(finished, repro, monkeypatch):
    losses = Losses()
    monkeypatch.setattr(loop, "cross_entropy", losses)
    before = content_of(finished)["cells"]
    assert len(before) == 6
    assert repro(finished, "--epsilon", 1, "--methods", "dp-sgd", "--seeds", 1) == 0
    assert content_of(finished)["cells"] == before and losses.count == 0
    # An epsilon that neither the table nor the command has is found, too.
    assert repro(finished, "--epsilon", 3, "--methods", "dp-sgd", "--seeds", 1) == 0
    assert repro(finished, "--epsilon", 1, "--methods", "dp-sgd", "--seeds", 1) == 0
    added = [cell for cell in content_of(finished)["cells"] if cell not in before]
    assert [(cell["epsilon"], cell["ours"]["seeds"]) for cell in added] == [(3, 1)]
    assert losses.count == STEPS
    assert "92.9 ± 0.3 (Table 5)" in markdown_of(finished)


def test_trainings_with_other_settings_are_not_taken(tmp_path, repro, capsys):
    arguments = (tmp_path, "--epsilon", 1, *TWO_METHODS, "--seeds", 1)
    real = tmp_path / "out" / "dp_kfc_table1.json"
    real.parent.mkdir()
    real.write_text("the table with the paper's settings")
    assert repro(*arguments) == 0
    assert repro(*arguments, "--epochs", 2) == 0
    assert real.read_text() == "the table with the paper's settings"
    assert len(list((tmp_path / "runs" / "mnist-cnn").iterdir())) == 4
    assert [len(content_of(tmp_path, epochs=epochs)["cells"]) for epochs in (1, 2)] == [2, 2]

    # A folder whose training is not the one that its name stands for; the others go on.
    options = next((tmp_path / "runs").glob("mnist-cnn/dp-sgd-*/eps-1/seed-0/options.json"))
    options.write_text(options.read_text().replace('"clip": 1.0', '"clip": 2.0'))
    capsys.readouterr()
    both = [repro(*arguments, "--epochs", epochs) for epochs in (1, 2)]
    assert sorted(both) == [0, 1]
    error = capsys.readouterr().err
    assert "DP-SGD, epsilon 1, seed 0: clip: the training in" in error
    assert "has 2.0, the table wants 1.0; name another folder with --runs" in error


def test_rows_without_data_are_listed_with_the_reason(tmp_path, repro, capsys):
    # The public data of MNIST is FashionMNIST, which is not there.
    assert repro(tmp_path, "--epsilon", 1, "--methods", "dp-kfc-public", "dp-sgd") == 0
    assert "fashion-mnist" in capsys.readouterr().err
    text = markdown_of(tmp_path)
    (row,) = grid(text, "method | epsilon")
    assert row["method"] == "DP-SGD" and row["seeds"] == "2"
    assert "- MNIST, Public DP-KFC: its data files" in text
    assert "(paper: 95.3 ± 0.4 at epsilon 1)" in text


def test_what_this_package_cannot_run_is_listed_with_the_paper_s_cells(tmp_path, repro):
    assert repro(tmp_path, "--methods", "adadps-public", table=2) == 0
    text = markdown_of(tmp_path, 2)
    assert "- FashionMNIST, public data MNIST, AdaDPS (Public): its data files" in text
    assert "PathMNIST is not among the data sets that are read here (paper: 70.5 ± 2.0" in text
    assert [cell["ours"] for cell in content_of(tmp_path, 2)["cells"]] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "3"], "table must be one of 1, 2, 5, 6, 7, search, tuned, got 3"),
        (["--seeds", "0"], "seeds must be an integer >= 1, got 0"),
        (["--jobs", "0"], "jobs must be an integer >= 1, got 0"),
        (["--timing", "--jobs", "2"], "jobs: what is timed runs alone, got 2"),
        (["--timing", "--timing-repeats", "0"], "timing_repeats must be an integer >= 1"),
        (["--methods", "magic"], "methods: table 1 has adadps, disk, dp-adambc"),
        (["--epsilon", "-1"], "epsilon must be a finite number > 0"),
        (["--data-dir", "nowhere"], "data_dir: nowhere is not a folder"),
        (["--table", "5", "--methods", "sgd", "--epsilon", "1"], "no cell of table 5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said(tmp_path, repro, capsys, arguments, message):
    assert repro(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dpkernels repro: ") and message in error
    assert not (tmp_path / "out").exists()
