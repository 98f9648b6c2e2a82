"""The average is the formula's, and what is evaluated and saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels import cli
from dpkernels.train.average import Average
from dpkernels.train.data import load
from dpkernels.train.loop import evaluate
from dpkernels.train.models import build
from python_tests.train.files import write_adult

pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")


def test_the_average_follows_the_formula_from_the_first_parameters_on():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    mean = [p.detach().double() for p in model.parameters()]
    average = Average(model, 0.5)
    decays = []
    for t in range(20):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p))
        average.update()
        decays.append(min(0.5, (1 + t) / (10 + t)))
        parameters = zip(mean, model.parameters(), strict=True)
        mean = [decays[-1] * m + (1 - decays[-1]) * p.detach().double() for m, p in parameters]
    assert decays[0] == 0.1 and decays[7] < 0.5 == decays[8] == decays[-1]
    with average.in_the_model():
        found = [p.detach().double() for p in model.parameters()]
    # mean + w (p - mean) of numbers below 4 rounds the difference, w and the product, below 8 each,
    # and the sum, below 4, by 2^-24; every later update at least halves what is there.
    for a, b in zip(found, mean, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2 * (8 + 8 + 8 + 4) * 2**-24)


def test_the_models_own_parameters_are_back_afterwards_whatever_happens():
    model = nn.Linear(3, 2)
    average = Average(model, 0.9)
    with torch.no_grad():
        model.weight += 1
    before = model.weight.detach().clone()
    inside = []

    def interrupted():
        inside.append(model.weight.detach().clone())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), average.in_the_model():
        interrupted()
    assert torch.equal(model.weight, before) and not torch.equal(inside[0], before)


@pytest.fixture
def trained(tmp_path):
    """Return a function that trains on a small data set and returns the folder of the run."""
    write_adult(tmp_path / "adult-a9a")

    def command(name, *arguments):
        common = ["--dataset", "adult", "--data-dir", str(tmp_path), "--seed", "2", "--quiet"]
        common += ["--batch-size", "64", "--epochs", "2", "--output", str(tmp_path / name)]
        assert cli.main(["train", *common, *arguments]) == 0
        return tmp_path / name

    return command


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def test_the_average_is_what_is_evaluated_and_saved(trained, tmp_path):
    plain, averaged = trained("plain"), trained("averaged", "--average", "0.9")
    checkpoint = torch.load(averaged / "checkpoint.pt", weights_only=True)
    means = checkpoint["extra"]["average"]["means"]
    for saved, mean in zip(weights(averaged).values(), means, strict=True):
        assert torch.equal(saved, mean)
    # It does not touch the training: the last parameters are those of the run without it.
    for name, value in weights(plain).items():
        assert torch.equal(checkpoint["model"][name], value)
        assert not torch.equal(weights(averaged)[name], value)
    assert "moving average" in (averaged / "report.txt").read_text()
    assert "moving average" not in (plain / "report.txt").read_text()
    data = load("adult", str(tmp_path))
    model = build("logistic", data.shape, data.classes)
    model.load_state_dict(weights(averaged))
    assert checkpoint["extra"]["epochs"][-1]["accuracy"] == evaluate(model, data.test)


def test_with_disk_the_average_is_of_iterates_and_not_of_shifted_points(trained):
    # A decay of 0 keeps the last iterate, which is what is saved without an average.
    plain = weights(trained("plain", "--method", "disk"))
    averaged = weights(trained("averaged", "--method", "disk", "--average", "0"))
    assert all(torch.equal(plain[name], averaged[name]) for name in plain)
