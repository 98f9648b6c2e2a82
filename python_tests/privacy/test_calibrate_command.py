"""What ``dpkernels calibrate`` prints and draws."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dpkernels import cli
from dpkernels.privacy import (
    EveryRecord,
    Poisson,
    Shuffled,
    WithoutReplacement,
    calibrate_command,
    gaussian_step,
    make_accountant,
)
from dpkernels.privacy.calibration import epsilon_after
from dpkernels.privacy.curve import epsilon_curve
from python_tests.optional_packages import optional_package

DELTA = ["--delta", "1e-5"]
SMALL = [*DELTA, "--records", "1000", "--batch-size", "100"]
SAMPLINGS = {
    "poisson": Poisson(0.1),
    "without-replacement": WithoutReplacement(100, 1000),
    "shuffled": Shuffled(10),
}


def rows(capsys, *arguments):
    assert cli.main(["calibrate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def check(row, epsilon):
    sampling = SAMPLINGS[row["sampling"]]
    assert row["adjacency"] == gaussian_step(1.0, sampling).adjacency
    spent = epsilon_after(
        row["noise_multiplier"], 1e-5, row["steps"], sampling, accountant=row["accountant"]
    )
    assert row["epsilon"] == spent and (epsilon is None or spent <= epsilon)


def test_noise_for_a_budget(capsys):
    found = rows(capsys, *SMALL, "--epsilon", "2", "--epochs", "3")
    assert {row["sampling"] for row in found} == set(SAMPLINGS)
    for row in found:
        check(row, 2.0)
        assert row["steps"] == 30 and row["epsilon"] > 0.98 * 2
    tightest = {row["sampling"]: row["noise_multiplier"] for row in reversed(found)}
    assert tightest["poisson"] < tightest["without-replacement"] < tightest["shuffled"]


def test_epsilon_for_noise(capsys):
    for row in rows(capsys, *SMALL, "--noise-multiplier", "5", "--steps", "30"):
        check(row, None)
        assert row["noise_multiplier"] == 5 and row["steps"] == 30


def test_steps_for_noise_and_a_budget(capsys):
    for row in rows(capsys, *SMALL, "--noise-multiplier", "20", "--epsilon", "2"):
        check(row, 2.0)


def test_a_rate_stands_for_records_and_batch_size(capsys):
    asked = ["--epsilon", "2", "--steps", "30"]
    with_rate = rows(capsys, *DELTA, "--rate", "0.1", *asked)
    for one, other in zip(with_rate, rows(capsys, *SMALL, *asked), strict=True):
        assert one["noise_multiplier"] == pytest.approx(other["noise_multiplier"], rel=1e-6)


def test_the_table_rounds_up_and_stars_the_chosen_sampling(capsys):
    arguments = ["calibrate", *SMALL, "--epsilon", "2", "--steps", "30", "--sampling", "shuffled"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[1] == "*" for line in lines] == [False] * 4 + [True] * 2
    exact = rows(capsys, *arguments[1:])
    for line, row in zip(lines, exact, strict=True):
        noise, steps, epsilon = line.split()[-3:]
        assert 0 <= float(noise) - row["noise_multiplier"] <= 1e-4
        assert 0 <= float(epsilon) - row["epsilon"] <= 1e-4 and steps == "30"


@pytest.mark.parametrize(
    ("adjacency", "shown"),
    [("add-remove", ["poisson"]), ("replace-one", ["without-replacement", "shuffled"])],
)
def test_only_samplings_of_the_adjacency_asked_for_are_shown(capsys, adjacency, shown):
    asked = [*SMALL, "--epsilon", "2", "--steps", "30"]
    found = rows(capsys, *asked, "--adjacency", adjacency)
    assert list(dict.fromkeys(row["sampling"] for row in found)) == shown
    assert found == [row for row in rows(capsys, *asked) if row["adjacency"] == adjacency]
    assert cli.main(["calibrate", *asked, "--adjacency", adjacency]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[1] == "*" for line in lines] == [True] * 2 + [False] * (len(lines) - 2)


def test_what_a_row_cannot_reach_is_said_below_the_table(capsys):
    assert cli.main(["calibrate", *SMALL, "--noise-multiplier", "1", "--epsilon", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "[1] noise_multiplier: with 1.0" in out and "take more noise" in out
    assert cli.main(["calibrate", *SMALL, "--noise-multiplier", "0", "--steps", "1"]) == 0
    assert "[1] epsilon is infinite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--epsilon", "1"], "give two of --epsilon"),
        ([*SMALL, "--epsilon", "1", "--steps", "3", "--epochs", "3"], "not both"),
        (
            [*SMALL, "--epsilon", "1", "--sampling", "poisson", "--adjacency", "replace-one"],
            "--sampling poisson is accounted under add-remove adjacency",
        ),
        ([*DELTA, "--epsilon", "1", "--steps", "3"], "give either --rate"),
        ([*SMALL, "--rate", "0.1", "--epsilon", "1", "--steps", "3"], "give either --rate"),
        ([*DELTA, "--rate", "1.5", "--epsilon", "1", "--steps", "3"], "rate must be in"),
        ([*DELTA, "--rate", "nan", "--epsilon", "1", "--steps", "3"], "rate must be in"),
        ([*SMALL, "--epsilon", "-1", "--steps", "3"], "epsilon must be finite and > 0"),
        ([*SMALL, "--epsilon", "1", "--steps", "0"], "steps must be a whole number >= 1"),
        ([*SMALL, "--noise-multiplier", "nan", "--steps", "3"], "noise_multiplier must be"),
        (["--delta", "0", *SMALL[2:], "--epsilon", "1", "--steps", "3"], "delta must be in"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    assert cli.main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_plot_is_drawn(capsys, tmp_path, sampling):
    optional_package("matplotlib")
    file = tmp_path / "curve.png"
    asked = ["--epsilon", "2", "--steps", "30", "--sampling", sampling, "--plot", str(file)]
    assert cli.main(["calibrate", *SMALL, *asked]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_plot_ends_at_the_epsilon_of_the_table(capsys, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(calibrate_command, "require_matplotlib", lambda: None)
    monkeypatch.setattr(calibrate_command, "plot", lambda curve, *_: drawn.append(curve))
    asked = ["--noise-multiplier", "2", "--steps", "30", "--plot", str(tmp_path / "some.png")]
    found = rows(capsys, *SMALL, *asked)
    wanted = {row["accountant"]: row["epsilon"] for row in found if row["sampling"] == "poisson"}
    (curve,) = drawn
    assert {name: values[-1] for name, values in curve.epsilons.items()} == wanted


def test_a_plot_without_matplotlib_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    asked = ["--epsilon", "2", "--steps", "30", "--plot", "none.png"]
    assert cli.main(["calibrate", *SMALL, *asked]) == 2
    assert "pip install 'dpkernels[plots]'" in capsys.readouterr().err


def test_a_curve_is_epsilon_after_each_step_count():
    statement = gaussian_step(2.0, EveryRecord())
    curve = epsilon_curve(statement, 50, 1e-5, ["gaussian", "rdp"], points=10)
    assert curve.steps[-1] == 50 and not curve.stairs
    for name, values in curve.epsilons.items():
        for steps, value in zip(curve.steps, values, strict=True):
            accountant = make_accountant(name)
            accountant.compose(statement, steps)
            assert value == accountant.epsilon(1e-5)


def test_a_curve_of_shuffled_steps_has_a_stair_for_each_epoch():
    curve = epsilon_curve(gaussian_step(2.0, Shuffled(7)), 24, 1e-5, ["gaussian"])
    assert curve.stairs and curve.steps == (7, 14, 21, 24)


def test_the_command_line_starts_without_what_only_accounting_needs():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from dpkernels import cli; cli._parser()\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "dpkernels" in loaded
    assert not loaded & {"numpy", "scipy", "matplotlib", "dp_accounting"}
