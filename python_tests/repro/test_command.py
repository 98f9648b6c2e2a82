"""``dpkernels repro`` from its arguments to its files, on small files in MNIST's format."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch

from dpkernels import cli
from dpkernels.train import loop
from python_tests.optional_packages import optional_package
from python_tests.train.files import write_mnist

optional_package("matplotlib")

RECORDS, TESTED, STEPS = 300, 50, 5  # round(300 / 64) steps in an epoch
TWO_METHODS = ("--methods", "dp-sgd", "dp-adambc")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_mnist(folder / "mnist", RECORDS, TESTED)
    return folder


@pytest.fixture(scope="module")
def repro(data_dir):
    """Return the command, one epoch and two seeds, that writes to ``folder``."""

    def command(folder, *arguments, table=1):
        common = ["--table", str(table), "--seeds", "2", "--epochs", "1", "--batch-size", "64"]
        common += ["--data-dir", str(data_dir), "--runs", str(folder / "runs"), "--quiet"]
        return cli.main(
            ["repro", "dp-kfc", *common, "--output", str(folder / "out"), *map(str, arguments)]
        )

    return command


@pytest.fixture(scope="module")
def finished(repro, tmp_path_factory):
    """Return the folder of a small table that was trained without disturbance."""
    folder = tmp_path_factory.mktemp("finished")
    assert repro(folder, "--epsilon", 2, 1, *TWO_METHODS, "dp-kfc") == 0
    return folder


def content_of(folder, table=1):
    return json.loads((folder / "out" / f"dp_kfc_table{table}.json").read_text())


def markdown_of(folder, table=1):
    return (folder / "out" / f"dp_kfc_table{table}.md").read_text()


def grid(text, first):
    """Return the rows of the Markdown table whose first columns are ``first``."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    names, _, *rows = ([part.strip() for part in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def without_clocks(cells):
    clocks = ("samples_per_second", "wall_seconds")
    return [
        cell | {"ours": {k: v for k, v in (cell["ours"] or {}).items() if k not in clocks}}
        for cell in cells
    ]


def test_ours_is_the_mean_and_spread_of_the_trainings(finished):
    cells = content_of(finished)["cells"]
    assert len(cells) == 6
    for cell in cells:
        runs = finished / "runs" / "mnist-cnn" / cell["method"] / f"eps-{cell['epsilon']:g}"
        reports = [json.loads((runs / f"seed-{n}" / "report.json").read_text()) for n in (0, 1)]
        a, b = (100 * report["accuracy"] for report in reports)
        assert cell["ours"]["seeds"] == 2
        assert cell["ours"]["mean"] == pytest.approx((a + b) / 2)
        # Of two numbers, with n - 1: their distance over the root of 2.
        assert cell["ours"]["spread"] == pytest.approx(abs(a - b) / math.sqrt(2))
        assert cell["ours"]["epsilon"] == reports[0]["privacy"]["epsilon"] <= cell["epsilon"]
        assert reports[0]["options"]["seed"] == 0 and reports[1]["options"]["seed"] == 1
        training = [RECORDS / report["samples_per_second"] for report in reports]
        assert cell["ours"]["wall_seconds"] > min(training)


def test_differences_in_markdown_are_those_of_its_columns(finished):
    rows = grid(markdown_of(finished), "method | epsilon")
    assert [(row["method"], row["epsilon"]) for row in rows] == [
        (method, epsilon)
        for method in ("DP-SGD", "DP-AdamBC", "Synthetic DP-KFC")
        for epsilon in ("2", "1")
    ]
    for row in rows:
        paper, ours = (float(row[name].split(" ± ")[0]) for name in ("paper", "ours"))
        assert row["difference"] == f"{ours - paper:+.2f}"
        assert 0.98 * float(row["epsilon"]) < float(row["epsilon spent"]) <= float(row["epsilon"])


def test_the_table_says_how_it_was_made_and_names_no_folder(finished, data_dir):
    text = markdown_of(finished)
    assert "Poisson sampling" in text and "Not the paper's settings: epochs = 1" in text
    assert "Data: normalised by published constants." in text
    assert "batch_size 64, epochs 1" in text and "Seeds are fixed" in text
    written = content_of(finished)
    assert written["provenance"]["versions"]["torch"] == torch.__version__
    assert written["commits_of_trainings"]
    for folder in (finished, data_dir):
        assert str(folder) not in text + json.dumps(written)
    picture = (finished / "out" / "dp_kfc_table1.png").read_bytes()
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
    assert without_clocks(content_of(tmp_path)["cells"]) == without_clocks(whole)

    folder = tmp_path / "runs" / "mnist-cnn" / "dp-adambc" / "eps-1" / "seed-0"
    attempts = json.loads((folder / "attempts.json").read_text())
    assert len(attempts) == 2
    seconds = sum(attempt["seconds"] for attempt in attempts)
    both = content_of(tmp_path)["cells"][1]["ours"]["wall_seconds"]
    other = json.loads((folder.parent / "seed-1" / "attempts.json").read_text())
    assert both == pytest.approx((seconds + other[0]["seconds"]) / 2)


def test_another_table_reads_what_is_trained_already(finished, repro, monkeypatch):
    losses = Losses()
    monkeypatch.setattr(loop, "cross_entropy", losses)
    assert repro(finished, "--epsilon", 1, *TWO_METHODS, table=6) == 0
    assert losses.count == 0
    both = [content_of(finished, table)["cells"] for table in (1, 6)]
    first = [cell for cell in both[0] if cell["epsilon"] == 1 and cell["method"] in TWO_METHODS]
    assert first == both[1]


def test_trainings_with_other_settings_are_not_taken(finished, repro, capsys):
    before = markdown_of(finished)
    assert repro(finished, "--epsilon", 1, *TWO_METHODS, "--epochs", 2) == 2
    error = capsys.readouterr().err
    assert "epochs: the training in" in error and "has 1, the table wants 2" in error
    assert markdown_of(finished) == before


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


def test_opacus_is_timed_by_the_same_command(tmp_path, repro):
    optional_package("opacus")
    # Of Table 7 the other data sets are not there; its only epsilon is 2.
    assert repro(tmp_path, "--methods", "dp-sgd", "--with-opacus", table=7) == 0
    written = content_of(tmp_path, 7)
    assert list(written["opacus_dp_sgd"]) == ["MNIST"]
    opacus = written["opacus_dp_sgd"]["MNIST"]
    assert list(opacus) == ["hooks", "ghost"]
    for trial in opacus.values():
        # Opacus searches noise until epsilon is within 0.01 of the budget.
        assert 1.99 <= trial["epsilon"] <= 2
        assert trial["wall_seconds"] > RECORDS / trial["samples_per_second"]
    ours, *missing = (cell["ours"] for cell in written["cells"])
    assert missing == [None, None]
    row, *_ = grid(markdown_of(tmp_path, 7), "method | accuracy")
    for mode, trial in opacus.items():
        training = ours["samples_per_second"] / trial["samples_per_second"]
        whole = trial["wall_seconds"] / ours["wall_seconds"]
        assert row[f"training vs. {mode}"] == f"{training:.2f}x"
        assert row[f"whole run vs. {mode}"] == f"{whole:.2f}x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "3"], "table must be one of 1, 2, 5, 6, 7, got 3"),
        (["--seeds", "0"], "seeds must be an integer >= 1, got 0"),
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
