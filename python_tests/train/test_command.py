"""``dpkernels train`` from its arguments to its files."""

from __future__ import annotations

import csv
import json
import signal

import pytest
import torch
from tqdm import tqdm

from dpkernels import cli
from dpkernels.train import loop
from python_tests.optional_packages import optional_package
from python_tests.train.files import write_adult

pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")

STEPS_OF_EPOCH = 6  # round(400 / 64)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_adult(folder / "adult-a9a")
    return folder


@pytest.fixture
def train(data_dir):
    """Return the command on a small data set in Adult's format, two epochs, quietly."""

    def command(output, *arguments):
        common = ["--data-dir", str(data_dir), "--output", str(output), "--quiet"]
        return cli.main(["train", *common, *arguments])

    return command


SMALL = ("--dataset", "adult", "--epochs", "2", "--batch-size", "64", "--epsilon", "4")


def report_in(folder):
    return json.loads((folder / "report.json").read_text())


def parameters_in(folder):
    state = torch.load(folder / "model.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


def test_digits_is_learnt_within_the_budget(tmp_path):
    optional_package("sklearn")
    output = tmp_path / "run"
    arguments = ["--epochs", "2", "--epsilon", "2", "--seed", "3", "--quiet"]
    assert cli.main(["train", *arguments, "--output", str(output)]) == 0
    report = report_in(output)
    assert 0.98 * 2 < report["privacy"]["epsilon"] <= 2
    # Guessing has mean 36 of 360 and standard deviation 5.7: half of them right is 25 of those off.
    assert report["accuracy"] > 0.5
    assert report["options"]["dataset"] == "digits" and report["options"]["model"] == "logistic"


@pytest.mark.parametrize("where", ["model", "data", "noise", "first backward", "options"])
def test_a_run_that_fails_before_its_first_step_can_begin_again(
    tmp_path, train, capsys, monkeypatch, where
):
    def fail(*_, **__):
        raise RuntimeError("not today")

    output = tmp_path / "runs" / "of" / "today"
    begun = ("--seed", "1", *SMALL)
    with monkeypatch.context() as patched:
        name = {
            "model": "dpkernels.train.prepared.build",
            "data": "dpkernels.train.prepared.data_of",
            "noise": "dpkernels.train.prepared.calibrate_noise_multiplier",
            "first backward": "dpkernels.train.loop.cross_entropy",
            "options": "dpkernels.train.options.Options.write",
        }[where]
        patched.setattr(name, fail)
        assert train(output, *begun) == 2
    assert "not today" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    # Where the folder was there before, it stays, and holds no run.
    output.mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(name, fail)
        assert train(output, *begun) == 2
    assert output.exists() and train(output, *begun) == 0


def test_a_run_that_fails_after_its_first_step_is_kept(tmp_path, train, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("not today")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "evaluate", fail)
        assert train(tmp_path / "run", *SMALL) == 2
    assert train(tmp_path / "run", *SMALL) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert train(tmp_path / "run", "--resume") == 0


def test_options_that_are_none_are_named(tmp_path, train, capsys):
    for content in ("[]", '{"epochs": "many"}', '{"epochs": 0}', "{"):
        (tmp_path / "options.json").write_text(content)
        assert train(tmp_path, "--resume") == 2
        assert "options.json" in capsys.readouterr().err


def test_files_tell_of_the_run(tmp_path, train, capsys):
    assert train(tmp_path, *SMALL) == 0
    report = report_in(tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [STEPS_OF_EPOCH, 2 * STEPS_OF_EPOCH]
    assert float(rows[0]["epsilon"]) < float(rows[1]["epsilon"]) == report["privacy"]["epsilon"]
    assert report["privacy"]["epsilon"] <= 4
    assert float(rows[1]["accuracy"]) == report["accuracy"]
    (released,) = report["privacy"]["releases"]
    assert released["statement"]["sampling"] == {"kind": "Poisson", "rate": 64 / 400}
    assert released["steps"] == 2 * STEPS_OF_EPOCH
    assert report["privacy"]["noise"] == report["privacy"]["samples"] == "operating system"
    text = (tmp_path / "report.txt").read_text()
    assert "not covered by epsilon" in text and "add-remove" in text
    # Whatever depends on the data is named there.
    assert list(report["privacy"]["depends_on_the_data"]) == ["nonfinite_samples"]
    assert "number of dropped samples" in text
    assert f"accuracy {report['accuracy']:.2%}" in capsys.readouterr().out


def test_a_fixed_seed_repeats_a_run_and_another_does_not(tmp_path, train):
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert train(tmp_path / name, *SMALL, "--seed", seed) == 0
    assert torch.equal(parameters_in(tmp_path / "a"), parameters_in(tmp_path / "b"))
    assert not torch.equal(parameters_in(tmp_path / "a"), parameters_in(tmp_path / "c"))


def test_microbatches_change_memory_and_not_the_model(tmp_path, train):
    for name, size in (("whole", "512"), ("parts", "7")):
        arguments = (*SMALL, "--seed", "5", "--physical-batch-size", size)
        assert train(tmp_path / name, *arguments) == 0
    # Sums in another order: float32 rounding, over 12 steps of values below 1.
    torch.testing.assert_close(parameters_in(tmp_path / "whole"), parameters_in(tmp_path / "parts"))
    epsilons = [report_in(tmp_path / name)["privacy"]["epsilon"] for name in ("whole", "parts")]
    assert epsilons[0] == epsilons[1]


def ctrl_c_at(step):
    """Return a progress bar that presses Ctrl-C when it is told of that step."""

    class Bar(tqdm):
        def update(self, n=1):
            super().update(n)
            if self.n == step:
                signal.raise_signal(signal.SIGINT)

    return Bar


def abrupt_end_at(call):
    """Return a loss that is interrupted, as by a second Ctrl-C, in the middle of a step."""
    calls = []

    def cross_entropy(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(*arguments, **options)

    return cross_entropy


@pytest.mark.parametrize(
    ("name", "interruption"),
    [
        ("tqdm", ctrl_c_at(4)),
        ("tqdm", ctrl_c_at(STEPS_OF_EPOCH)),
        ("cross_entropy", abrupt_end_at(9)),
        ("cross_entropy", abrupt_end_at(1)),
    ],
    ids=["in an epoch", "at the end of an epoch", "in a step", "in the first step"],
)
def test_an_interrupted_run_ends_where_an_undisturbed_one_does(
    tmp_path, train, monkeypatch, capsys, name, interruption
):
    arguments = (*SMALL, "--seed", "5")
    assert train(tmp_path / "whole", *arguments) == 0
    with monkeypatch.context() as patched:
        # tqdm counts nothing where it is disabled.
        shown = {"tqdm": lambda **options: interruption(total=options["total"], file=_Nowhere())}
        patched.setattr(loop, name, shown.get(name, interruption))
        assert train(tmp_path / "parts", *arguments) == 130
    assert f"--resume --output {tmp_path / 'parts'}" in capsys.readouterr().err
    assert not (tmp_path / "parts" / "report.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert cli.main(["train", "--quiet", "--resume", "--output", str(tmp_path / "parts")]) == 0
    whole, parts = (report_in(tmp_path / folder)["privacy"] for folder in ("whole", "parts"))
    assert whole["epsilon"] == parts["epsilon"] and whole["steps"] == parts["steps"]
    assert torch.equal(parameters_in(tmp_path / "whole"), parameters_in(tmp_path / "parts"))


class _Nowhere:
    """Takes what a progress bar writes."""

    def write(self, text):
        return len(text)

    def flush(self):
        pass


def test_a_finished_run_is_not_trained_further(tmp_path, train):
    assert train(tmp_path, *SMALL) == 0
    before = report_in(tmp_path)["privacy"]
    assert train(tmp_path, "--resume") == 0
    after = report_in(tmp_path)["privacy"]
    assert (before["epsilon"], before["steps"]) == (after["epsilon"], after["steps"])


def test_without_noise_there_is_no_epsilon_and_the_report_says_so(tmp_path, train, capsys):
    assert train(tmp_path, *SMALL, "--method", "sgd") == 0
    report = report_in(tmp_path)
    assert report["privacy"]["epsilon"] is None
    assert "without clip and noise" in report["privacy"]["not_private"]
    assert "no epsilon: not private" in capsys.readouterr().out
    # One person in 64 lacks all three marks and is guessed, 3 of 200; any mark tells the others.
    assert report["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "imagenet"], "dataset must be one of digits, mnist"),
        (["--method", "magic"], "method must be one of dp-sgd, dp-kfc"),
        (["--dataset", "adult", "--model", "cnn"], "cnn takes images"),
        (["--dataset", "adult", "--batch-size", "401"], "at most the number of records, 400"),
        (["--dataset", "adult", "--batch-size", "0"], "batch_size must be an integer >= 1"),
        (["--dataset", "adult", "--epsilon", "-1"], "epsilon must be a finite number > 0"),
        (["--dataset", "adult", "--delta", "0.01"], "delta must be less than 1 / the number of"),
        (["--dataset", "adult", "--optimizer", "lion"], "optimizer must be one of adam, adamw"),
        (["--method", "dp-adambc", "--optimizer", "sgd"], "leave --optimizer out"),
        (["--dataset", "mnist"], "train-images-idx3-ubyte is not there, nor with .gz or .xz"),
        (["--dataset", "adult", "--accountant", "moments"], "accountant"),
        (["--resume"], "nothing can be resumed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said(tmp_path, train, capsys, arguments, message):
    assert train(tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dpkernels train: ") and message in error
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_run_is_neither_overwritten_nor_resumed_with_another_budget(tmp_path, train, capsys):
    assert train(tmp_path, *SMALL) == 0
    assert train(tmp_path, *SMALL) == 2
    assert "holds a run already; go on with it by --resume" in capsys.readouterr().err
    assert train(tmp_path, "--resume", "--epsilon", "8") == 2
    assert "epsilon: the run in" in capsys.readouterr().err


def test_two_processes_do_not_train_in_one_folder(tmp_path, train, monkeypatch, capsys):
    """Both would go on from one checkpoint, and release two trainings for the epsilon of one."""
    others = []

    def beside(*arguments):
        # The lock is the open file's, so that one process can stand for two.
        monkeypatch.setattr(loop, "evaluate", evaluate)
        others.append(train(tmp_path, "--resume"))
        return evaluate(*arguments)

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", beside)
    assert train(tmp_path, *SMALL) == 0
    assert others == [2] and "another process trains in" in capsys.readouterr().err
    # Afterwards, the folder is free.
    assert train(tmp_path, "--resume") == 0


def test_the_list_names_every_method(capsys):
    assert cli.main(["train", "--list"]) == 0
    listed = capsys.readouterr().out
    for name in ("dp-sgd", "dp-kfc-public", "dp-kfc+adambc", "disk", "adadps", "adadps-public"):
        assert f"\n  {name} " in listed
