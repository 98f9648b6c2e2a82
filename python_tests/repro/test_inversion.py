"""Gradient inversion: it sees what has no noise, fails where there is, and can be repeated."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpkernels.cli import main
from dpkernels.federated.problem import Layer
from dpkernels.repro.federated.inversion import command, study, uploads
from dpkernels.repro.federated.inversion.attack import invert, label_of, mse, psnr
from dpkernels.repro.federated.inversion.lenet import lenet
from dpkernels.train.data import load

pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def scene():
    effort = study.Effort(iterations=150, restarts=1)
    return study.conduct(load("digits"), (1.0,), effort, targets=2, report=lambda text: None)


def gradient_of(model, x, label):
    loss = cross_entropy(model(x[None]), torch.tensor([label]))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_psnr_is_that_of_the_mean_squared_error():
    black, grey = torch.zeros(1, 2, 2), torch.full((1, 2, 2), 0.1)
    assert mse(black, grey) == pytest.approx(0.01)
    assert psnr(black, grey) == pytest.approx(20.0)
    assert psnr(black, torch.ones(1, 2, 2)) == pytest.approx(0.0)
    assert psnr(grey, grey) == math.inf


def test_an_update_without_noise_gives_the_image_away_whatever_its_clip(scene):
    for cell in scene.cells[:2]:
        assert cell.sigma is None and cell.std == 0
        assert min(cell.psnr) > 25
        assert all(cell.label) and cell.label_rate == 1


def test_a_noised_update_does_not(scene):
    noisy = [cell for cell in scene.cells if cell.sigma is not None]
    assert len(noisy) == 4
    for cell in noisy:
        assert max(cell.psnr) < 15
        # What the attacker sees says so: the direction that was found is far from the upload's.
        assert min(cell.loss) > 0.3


def test_a_seed_gives_the_same_image_again_and_another_one_does_not():
    model = lenet((1, 8, 8), 10)
    seen = gradient_of(model, torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(1)), 3)
    first, again, other = (
        invert(model, seen, (1, 8, 8), 10, iterations=5, restarts=1, seed=seed)
        for seed in (0, 0, 1)
    )
    assert torch.equal(first.image, again.image) and first.loss == again.loss
    assert not torch.equal(first.image, other.image)


def test_the_start_with_the_least_loss_counts():
    model = lenet((1, 8, 8), 10)
    seen = gradient_of(model, torch.ones(1, 8, 8), 3)
    losses = [
        invert(model, seen, (1, 8, 8), 10, iterations=8, restarts=n).loss for n in (1, 2, 3, 4)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("label", range(10))
def test_the_last_rows_show_the_label(label):
    model = lenet((1, 8, 8), 10)
    gradient = gradient_of(model, torch.ones(1, 8, 8), label)
    assert label_of(model, gradient) == label
    known = invert(model, gradient, (1, 8, 8), 10, iterations=3, restarts=1, label=label)
    assert known.label == label


def test_a_last_layer_without_a_bias_shows_the_label_and_a_convolution_does_not():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    assert label_of(model, gradient_of(model, torch.ones(1, 8, 8), 7)) == 7
    with pytest.raises(ValueError, match="must end in a linear layer"):
        label_of(nn.Conv2d(1, 3, 2), torch.zeros(15))


def test_more_noise_hides_more_labels(scene):
    rates = {cell.method: cell.label_rate for cell in scene.cells}
    assert rates["UDP-FedAvg, full noise"] < rates["UDP-FedAvg"] < rates["clip, no noise"]


def made_round():
    torch.manual_seed(0)
    layers = (Layer("w", 0, (20, 30)), Layer("b", 600, (20,)))
    return uploads.Round(torch.randn(620), layers, 5 * torch.randn(10, 620))


def method(name):
    return next(one for one in uploads.METHODS if one.name == name)


@pytest.mark.parametrize(
    ("name", "std"), [("UDP-FedAvg", 1.5 / 10**0.5), ("UDP-FedAvg, full noise", 1.5)]
)
def test_the_noise_of_an_upload_is_the_one_that_is_stated(name, std):
    made = made_round()
    clean = uploads.seen(method("clip, no noise"), made, 1.5, seed=3)
    noise = uploads.seen(method(name), made, 1.5, seed=3) - clean
    assert uploads.noise_std(method(name), 1.5, 10) == pytest.approx(std)
    # 6,200 draws: the deviation of their deviation is 0.9%.
    assert noise.std().item() == pytest.approx(std, rel=0.04)
    assert torch.linalg.vector_norm(clean, dim=1).max() <= uploads.CLIP * (1 + 1e-6)


def test_slices_without_a_threshold_are_the_uploads(monkeypatch):
    made = made_round()
    monkeypatch.setattr(uploads, "threshold", lambda sigma: 0.0)
    sent = uploads.seen(method("FedCEO upload"), made, 1.0, seed=5)
    sliced = uploads.seen(method("FedCEO slice"), made, 1.0, seed=5)
    torch.testing.assert_close(sliced, sent, rtol=1e-4, atol=1e-4)


def test_the_command_writes_figures_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    few = ["--iterations", "3", "--restarts", "1", "--images", "2"]
    assert command.main(["--datasets", "digits", *few, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "fedceo_inversion.json").read_text())
    cells = found["scenes"][0]["cells"]
    assert [cell["sigma"] for cell in cells] == [None] * 3 + [1.0] * 4 + [1.5] * 4 + [2.0] * 4
    assert all(len(cell["psnr"]) == 2 for cell in cells)
    table = (tmp_path / "fedceo_inversion.md").read_text()
    assert all(cell["method"] in table for cell in cells)
    assert (tmp_path / "fedceo_inversion.png").read_bytes()[:4] == b"\x89PNG"


def test_the_attack_is_fedceos_alone(tmp_path, capsys):
    common = ["--attack", "--data-dir", str(tmp_path), "--output", str(tmp_path)]
    assert main(["repro", "dp-fednew", *common]) == 2
    assert "it is fedceo's" in capsys.readouterr().err
    assert main(["repro", "fedceo", *common]) == 2  # there are no images in that folder
    assert "cifar10" in capsys.readouterr().err
