"""Every method trains, and only those with a guarantee report an epsilon."""

from __future__ import annotations

import json
import signal
import warnings

import pytest
import torch

from dpkernels import cli
from dpkernels.train import loop
from dpkernels.train.data import Data, Records
from dpkernels.train.methods import METHODS, synthetic_probe
from dpkernels.train.options import filled_in
from dpkernels.train.text import CLS, PAD, VOCABULARY
from python_tests.train.files import write_adult, write_mnist

NOT_PRIVATE = {"sgd", "dp-kfc-oracle"}
NEED_PUBLIC_DATA = {"dp-kfc-public", "adadps-public"}


def trained(output, data_dir, *arguments, status=0):
    """Run the command; return its report, if it came to its end."""
    common = ["--data-dir", str(data_dir), "--output", str(output), "--quiet", "--seed", "2"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*with the fixed seed")
        assert cli.main(["train", *common, *arguments]) == status
    return None if status else json.loads((output / "report.json").read_text())


@pytest.mark.parametrize("method", sorted(METHODS.keys() - NEED_PUBLIC_DATA))
def test_every_method_learns_and_keeps_to_its_budget(tmp_path, method):
    write_adult(tmp_path / "adult-a9a")
    # The most that noise with tails of 2^-96 can be asked for is some 45 here.
    arguments = ["--dataset", "adult", "--batch-size", "64", "--epsilon", "40", "--epochs", "4"]
    if METHODS[method].optimizer == "adambc":
        arguments += ["--lr", "0.02"]
    report = trained(tmp_path / "run", tmp_path, "--method", method, *arguments)
    epsilon = report["privacy"]["epsilon"]
    if method in NOT_PRIVATE:
        assert epsilon is None and report["privacy"]["not_private"]
    else:
        assert 0.98 * 40 < epsilon <= 40
    # Guessing has mean 100 of 200 and standard deviation 7: 140 are more than 5 of those off.
    assert report["accuracy"] > 0.7


@pytest.mark.parametrize("filtered", [(), ("--filter", "disk")])
def test_sofim_learns_and_keeps_to_the_budget(tmp_path, filtered):
    write_adult(tmp_path / "adult-a9a")
    arguments = ["--dataset", "adult", "--batch-size", "64", "--epsilon", "40", "--epochs", "4"]
    report = trained(tmp_path / "run", tmp_path, "--optimizer", "sofim", *filtered, *arguments)
    assert 0.98 * 40 < report["privacy"]["epsilon"] <= 40
    assert report["accuracy"] > 0.7


@pytest.mark.parametrize(
    "method", ["dp-kfc", "dp-kfc+adambc", "disk", "adadps", "dp-sgd --optimizer sofim"]
)
def test_a_resumed_run_goes_on_with_the_same_factors_filters_rates_and_averages(
    tmp_path, monkeypatch, method
):
    write_adult(tmp_path / "adult-a9a")
    arguments = ["--dataset", "adult", "--batch-size", "64", "--epochs", "2"]
    arguments += ["--method", *method.split(), "--schedule", "cosine", "--average", "0.9"]
    if METHODS[method.split()[0]].takes("refresh_every"):
        arguments += ["--refresh-every", "5"]
    trained(tmp_path / "whole", tmp_path, *arguments)
    batches = []

    def interrupted(*given, **options):
        batches.append(1)
        if len(batches) == 8:
            signal.raise_signal(signal.SIGINT)
        return torch.nn.functional.cross_entropy(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "cross_entropy", interrupted)
        trained(tmp_path / "parts", tmp_path, *arguments, status=130)
    trained(tmp_path / "parts", tmp_path, "--resume")
    whole, parts = (
        torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("method", sorted(NEED_PUBLIC_DATA))
def test_public_curvature_comes_from_the_proxy_and_keeps_the_guarantee(tmp_path, method):
    write_mnist(tmp_path / "mnist", train=60)
    write_mnist(tmp_path / "fashion-mnist")
    arguments = ["--dataset", "mnist", "--model", "logistic", "--epochs", "1", "--batch-size", "20"]
    report = trained(tmp_path / "run", tmp_path, "--method", method, *arguments)
    assert report["privacy"]["epsilon"] <= 1
    assert "public" in report["preconditioner"]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("image", (3, 8, 8)), ("binary", (12,)), ("text", (30,)), ("tokens", (20,))],
)
def test_probes_have_the_shape_and_kind_of_the_data(kind, shape):
    nothing = Records(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    probe = synthetic_probe(Data("some", kind, 4, nothing, nothing, ""))
    (inputs,), targets = probe.batch(50, torch.Generator().manual_seed(0))
    assert inputs.shape == (50, *shape) and set(targets.tolist()) == {0, 1, 2, 3}
    if kind == "binary":
        assert set(inputs.flatten().tolist()) == {0.0, 1.0}
    if kind == "text":
        assert inputs.min() == 0
        torch.testing.assert_close(inputs.norm(dim=1), torch.ones(50))
    if kind == "tokens":
        assert (inputs[:, 0] == CLS).all() and (inputs[:, 1:] != CLS).all()
        assert (inputs == PAD).any() and inputs.min() >= 0 and inputs.max() < VOCABULARY


def test_learning_rates_are_those_of_the_optimizer():
    assert filled_in({"optimizer": "adam"}).lr == 1e-3
    # As DPAdamBC's own default: half of Adam's.
    assert filled_in({"method": "dp-adambc"}).lr == filled_in({"optimizer": "adambc"}).lr == 5e-4
    assert filled_in({}).lr == 0.1 and filled_in({"lr": 0.5}).lr == 0.5
    assert filled_in({"optimizer": "sofim"}).lr == 0.5
