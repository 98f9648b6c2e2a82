"""``dpkernels federate`` from its arguments to its files."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from dpkernels import cli
from dpkernels.federated import federate as running
from dpkernels.federated.loop import Federation
from dpkernels.federated.settings import ALGORITHMS
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.mechanism import Statement
from python_tests.optional_packages import optional_package

optional_package("sklearn")
pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")
FILES = {"checkpoint.pt", "metrics.csv", "model.pt", "options.json", "report.json", "report.txt"}
SMALL = ("--rounds", "12", "--evaluate-every", "4", "--clients", "20")


def federate(output, *arguments):
    return cli.main(["federate", "--quiet", "--output", str(output), *arguments])


def report_in(folder):
    return json.loads((folder / "report.json").read_text())


def model_in(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def test_the_default_learns_digits_within_its_budget(tmp_path):
    assert federate(tmp_path, "--seed", "1") == 0
    report = report_in(tmp_path)
    assert 0.98 < report["privacy"]["epsilon"] <= 1
    # 90.9% on held-out records, where runs have a standard deviation of 2.1 points.
    assert report["accuracy"] > 0.85
    assert {file.name for file in tmp_path.iterdir()} >= FILES


def test_files_tell_of_the_run(tmp_path, capsys):
    arguments = (*SMALL, "--level", "user", "--epsilon", "8", "--sampling", "fixed:10")
    assert federate(tmp_path, *arguments) == 0
    report, privacy = report_in(tmp_path), report_in(tmp_path)["privacy"]
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == [4, 8, 12, 13]
    assert float(rows[-1]["epsilon"]) == privacy["epsilon"] <= 8
    assert float(rows[-1]["accuracy"]) == report["accuracy"]
    assert {row["arrived"] for row in rows} == {"10"}
    # Epsilon is that of the statements, and these are of the terms.
    accountant = make_accountant("pld")
    for release in privacy["releases"]:
        statement = Statement.from_dict(release["statement"])
        assert (statement.unit, statement.view) == ("user", "aggregate")
        assert statement.adjacency == "replace-one" and statement.sampled == "clients"
        accountant.compose(statement, release["releases"])
    assert accountant.epsilon(privacy["delta"]) == privacy["epsilon"]
    assert [x["releases"] for x in privacy["releases"]] == [1, 12]
    text = (tmp_path / "report.txt").read_text()
    assert "number of all records" in text and "holds clients' private state" in text
    assert "for one user, replace-one; the server sees only sums" in capsys.readouterr().out


def test_the_model_that_is_written_is_the_one_that_was_measured(tmp_path):
    from dpkernels.federated.data import load

    assert federate(tmp_path, *SMALL, "--seed", "1") == 0
    model, data = model_in(tmp_path), load("digits")
    x = torch.nn.functional.pad(data.x_test - model["feature_mean"], (0, 1), value=model["bias"])
    right = ((x @ model["theta"].mT).argmax(1) == data.y_test).double().mean().item()
    assert right == pytest.approx(report_in(tmp_path)["accuracy"], abs=1e-12)


def test_the_curve_is_a_picture(tmp_path):
    optional_package("matplotlib")
    assert federate(tmp_path, *SMALL) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_all_but_the_curve_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert federate(tmp_path, *SMALL) == 0
    assert not (tmp_path / "curve.png").exists() and (tmp_path / "report.json").exists()
    assert "pip install 'dpkernels[plots]'" in capsys.readouterr().err


RUNS = [
    (),
    ("--algorithm", "fednew", "--dual", "clean", "--level", "user"),
    ("--sampling", "poisson:0.5", "--level", "user"),
    ("--sampling", "shuffled:6", "--record-rate", "0.5"),
    ("--algorithm", "fedceo", "--restart", "own", "--interval", "2", "--view", "each_upload"),
    ("--algorithm", "local-dpsgd", "--model", "mlp", "--record-rate", "0.5"),
    ("--algorithm", "centaur", "--sampling", "poisson:0.5"),
]


def interrupted_in(round_):
    """Return ``Federation.round`` that presses Ctrl-C in the middle of that round."""
    whole = Federation.round

    def pressed(self):
        if self.rounds_begun + 1 == round_:
            signal.raise_signal(signal.SIGINT)
        return whole(self)

    return pressed


def assert_same(tmp_path):
    whole, parts = (report_in(tmp_path / name)["privacy"] for name in ("whole", "parts"))
    assert whole["epsilon"] == parts["epsilon"] and whole["releases"] == parts["releases"]
    assert torch.equal(model_in(tmp_path / "whole")["theta"], model_in(tmp_path / "parts")["theta"])
    metrics = [
        (tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("whole", "parts")
    ]
    # All but the seconds.
    first, second = ([line.rsplit(",", 1)[0] for line in lines] for lines in metrics)
    assert first == second


@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
@pytest.mark.parametrize("round_", [1, 6])
def test_ctrl_c_ends_a_run_where_it_goes_on(tmp_path, monkeypatch, capsys, arguments, round_):
    arguments = (*SMALL, "--seed", "5", *arguments)
    assert federate(tmp_path / "whole", *arguments) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Federation, "round", interrupted_in(round_))
        assert federate(tmp_path / "parts", *arguments) == 130
    assert "go on with: dpkernels federate --resume" in capsys.readouterr().err
    assert not (tmp_path / "parts" / "report.json").exists()
    assert federate(tmp_path / "parts", "--resume") == 0
    assert_same(tmp_path)


def test_a_killed_run_goes_on_with_the_same_epsilon(tmp_path):
    arguments = (
        *SMALL,
        "--seed",
        "5",
        "--algorithm",
        "fednew",
        "--dual",
        "clean",
        "--level",
        "user",
        "--checkpoint-every",
        "10",
    )
    assert federate(tmp_path / "whole", *arguments) == 0
    # Killed in round 7: the checkpoint is of round 4.
    code = (
        "import os, signal, sys\n"
        "from dpkernels import cli\n"
        "from dpkernels.federated.loop import Federation\n"
        "step = Federation._open\n"
        "def killed(self, *given):\n"
        "    if self.rounds_begun == 7:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    step(self, *given)\n"
        "Federation._open = killed\n"
        "cli.main(sys.argv[1:])\n"
    )
    command = ["federate", "--quiet", "--output", str(tmp_path / "parts"), *arguments]
    done = subprocess.run(
        [sys.executable, "-c", code, *command], env=os.environ, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    state = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    assert state["federation"]["rounds_begun"] == 4
    assert federate(tmp_path / "parts", "--resume") == 0
    assert_same(tmp_path)


def test_nothing_is_measured_in_public_before_its_checkpoint(tmp_path, monkeypatch):
    """What was shown cannot be counted once and trained twice."""

    def fail(output, *_):
        state = torch.load(output / "checkpoint.pt", weights_only=True)
        seen.append(state["federation"]["position"])
        write(output, *_)

    seen, write = [], running.write_metrics
    monkeypatch.setattr(running, "write_metrics", fail)
    assert federate(tmp_path, *SMALL) == 0
    assert seen == [4, 8, 12, 13]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--algorithm", "fednew", "--dual", "uploaded"), "dual='uploaded'"),
        (("--algorithm", "fednew-fc", "--rescale", "xi"), "rescale='xi'"),
        (("--algorithm", "scaffold", "--control", "uploaded"), "control='uploaded'"),
        (("--algorithm", "scaffold", "--local-steps", "3"), "several local steps"),
        (("--algorithm", "local-dpsgd", "--local-steps", "3"), "several local steps"),
        (("--algorithm", "fedceo", "--restart", "own"), "restart='own'"),
        (("--algorithm", "fedceo", "--restart", "slot", "--lam", "inf"), "restart='slot'"),
    ],
    ids=str,
)
def test_steps_without_a_guarantee_report_no_epsilon(tmp_path, capsys, arguments, why):
    assert federate(tmp_path, *SMALL, *arguments) == 0
    said, privacy = capsys.readouterr(), report_in(tmp_path)["privacy"]
    assert said.err.startswith("NO GUARANTEE: ") and why in said.err
    assert "epsilon: none; the paper would claim " in said.out
    assert "do not publish it" in said.out
    assert "may be published" not in said.out
    assert privacy["epsilon"] is None and why in privacy["not_private"]
    assert 0.9 < privacy["claimed_epsilon"] <= 1
    with (tmp_path / "metrics.csv").open() as file:
        assert {row["epsilon"] for row in csv.DictReader(file)} == {""}


def test_without_noise_there_is_no_epsilon(tmp_path, capsys):
    assert federate(tmp_path, *SMALL, "--epsilon", "none") == 0
    said, privacy = capsys.readouterr(), report_in(tmp_path)["privacy"]
    assert "adds no noise" in said.err and "epsilon: none (no noise was added" in said.out
    assert privacy["epsilon"] is None and privacy["claimed_epsilon"] is None


def test_what_is_declared_public_or_held_out_is_said(tmp_path):
    arguments = ("--algorithm", "fedgd", "--public", "pca:20", "--validation", "200", "--bias", "1")
    assert federate(tmp_path, *SMALL, *arguments) == 0
    text = (tmp_path / "report.txt").read_text()
    assert "DECLARED: pca:20 of the private training records" in text
    assert "not covered by epsilon: accuracy on held-out records, --public pca:20" in text
    assert "accuracy_not_private" in (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert model_in(tmp_path)["theta"].shape == (10, 21)


def test_lost_uploads_are_counted_and_enough_of_them_end_a_run(tmp_path, capsys):
    lossy = (*SMALL, "--seed", "1", "--lose", "0.1")
    assert federate(tmp_path / "enough", *lossy, "--max-dropouts", "6") == 0
    report = report_in(tmp_path / "enough")
    assert report["faults"]["missing"] > 0 and report["rounds_released"] == 13
    assert report["privacy"]["epsilon"] <= 1
    assert federate(tmp_path / "few", *SMALL, "--lose", "0.9") == 2
    assert "max_dropouts: 20 clients must answer" in capsys.readouterr().err


def test_how_many_users_a_poisson_sample_had_is_not_covered_and_said(tmp_path):
    names = [f"{name}_not_private" for name in ("clients", "arrived", "bytes_up", "bytes_down")]
    for level, secret in (("user", True), ("record", False)):
        output = tmp_path / level
        assert federate(output, *SMALL, "--sampling", "poisson:0.5", "--level", level) == 0
        columns = (output / "metrics.csv").read_text().splitlines()[0].split(",")
        assert (set(names) <= set(columns)) is secret
        assert ("how many clients took part" in report_in(output)["not_covered"]) is secret


def test_a_network_is_trained_and_can_be_loaded(tmp_path):
    from dpkernels.train.models import build

    arguments = ("--algorithm", "fedgd", "--model", "cnn", "--clients", "3", "--rounds", "2")
    assert federate(tmp_path, *arguments, "--lr", "0.1", "--epsilon", "8") == 0
    network = build("cnn", (1, 8, 8), 10)
    network.load_state_dict(model_in(tmp_path)["state_dict"])
    assert report_in(tmp_path)["privacy"]["epsilon"] <= 8


USER_LEVEL = [
    ("--algorithm", "udp-fedavg", "--shrink", "layer", "--local-epochs", "2"),
    ("--algorithm", "udp-fedavg", "--momentum", "0.5", "--decay", "0.9", "--model", "softmax"),
    ("--algorithm", "udp-fedavg", "--shrink", "scalar", "--shrunk", "filtered", "--model", "cnn"),
    ("--algorithm", "fedceo", "--lam", "5", "--theta", "1.05", "--interval", "3"),
    ("--algorithm", "fedceo", "--sampling", "poisson:0.5", "--fold-last", "1"),
    ("--algorithm", "ppsgd", "--personal-lr", "0.05", "--local-batch", "8"),
    ("--algorithm", "udp-fedavg", "--local-momentum", "0.9", "--local-lr", "0.01"),
    ("--algorithm", "centaur", "--head-steps", "2", "--local-steps", "2"),
]


@pytest.mark.parametrize("arguments", USER_LEVEL, ids=" ".join)
def test_networks_are_trained_by_their_clients_and_users_protected(tmp_path, capsys, arguments):
    assert federate(tmp_path, *SMALL, *arguments, "--epsilon", "8") == 0
    report, said = report_in(tmp_path), capsys.readouterr().out
    assert 0 < report["privacy"]["epsilon"] <= 8 and "for one user" in said
    personal = ALGORITHMS[arguments[1]].kind.personal
    assert ("accuracy of personal models" in report["not_covered"]) is personal
    columns = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert ("accuracy_not_private" in columns) is personal
    assert "state_dict" in model_in(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--algorithm", "magic"), "algorithm must be one of ours, fedgd"),
        (("--dataset", "imagenet"), "dataset must be one of digits, mnist"),
        (
            ("--momentum", "0.5", "--algorithm", "fedfc"),
            "leave --momentum out, or take --algorithm",
        ),
        (("--delta", "0.1"), "delta must be less than 1 / the number of records"),
        (("--resume",), "nothing can be resumed"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, capsys, arguments, message):
    assert federate(tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dpkernels federate: ") and message in error
    assert error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_run_is_neither_overwritten_nor_resumed_with_another_budget(tmp_path, capsys):
    assert federate(tmp_path, *SMALL) == 0
    epsilon = report_in(tmp_path)["privacy"]["epsilon"]
    assert federate(tmp_path, *SMALL) == 2
    assert "holds a run already; go on with it by --resume" in capsys.readouterr().err
    assert federate(tmp_path, "--resume", "--epsilon", "8") == 2
    assert "epsilon: the run in" in capsys.readouterr().err
    # At its end there is nothing left to train.
    assert federate(tmp_path, "--resume") == 0
    assert report_in(tmp_path)["privacy"]["epsilon"] == epsilon


def test_the_list_names_every_algorithm_and_its_settings(capsys):
    assert cli.main(["federate", "--list"]) == 0
    listed = capsys.readouterr().out
    for name in ALGORITHMS:
        assert f"\n  {name} " in listed
    assert "fold_last" in listed and "lenet5" in listed and "cnn5x5" in listed
    assert "local_momentum" in listed
    assert "hessian_clip" in listed and "emnist-letters" in listed and "shards" in listed


# Few clients and steps: what a run is made of, not how good it is.
FEDFISHER = ("--algorithm", "fedfisher", "--clients", "3", "--local-steps", "2", "--rounds", "2")


def test_fedfisher_as_published_says_that_it_is_not_private(tmp_path, capsys):
    plain = (*FEDFISHER, "--training", "sgd", "--local-epochs", "1", "--model", "softmax")
    assert federate(tmp_path / "refused", *plain) == 2
    assert "take --epsilon none, or --training dp-sgd" in capsys.readouterr().err
    assert federate(tmp_path, *plain, "--epsilon", "none") == 0
    told = capsys.readouterr()
    assert "NO GUARANTEE: training='sgd' uploads models and Fisher information" in told.err
    assert "epsilon: none (training='sgd'" in told.out and "do not publish it" in told.out
    privacy = report_in(tmp_path)["privacy"]
    assert privacy["epsilon"] is None and privacy["stages"][0]["sensitivity"] is None
    assert "sensitivity not bounded" in (tmp_path / "report.txt").read_text()


def test_fedfisher_with_a_budget_reports_both_of_its_stages_and_resumes(tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    chosen = (*FEDFISHER, "--model", "softmax", "--epsilon", "8", "--seed", "1")
    assert federate(whole, *chosen) == 0
    report = report_in(whole)
    assert 7.9 < report["privacy"]["epsilon"] <= 8
    stages = [(each["stage"], each["releases_a_round"]) for each in report["privacy"]["stages"]]
    assert stages == [("models 1", 2), ("factors 1", 1), ("models 2", 2), ("factors 2", 1)]
    with monkeypatch.context() as patched:
        patched.setattr(Federation, "round", interrupted_in(2))
        assert federate(stopped, *chosen) == 130
    assert federate(stopped, "--resume") == 0
    assert report_in(stopped)["privacy"] == report["privacy"]
    assert torch.equal(model_in(stopped)["theta"], model_in(whole)["theta"])
