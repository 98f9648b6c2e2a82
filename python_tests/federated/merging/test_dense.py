"""DENSE: a student learns more than any client knew, from images that nobody had."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpkernels.federated.merging.dense import DenseSettings, dense
from dpkernels.federated.merging.dense_images import (
    BatchStatistics,
    Ensemble,
    Generator,
    augmented,
    boundary_support,
)
from dpkernels.train.data import PIXELS, load

SHAPE = (1, 8, 8)
QUICK = DenseSettings(
    epochs=2, generator_steps=2, batch=8, latent=5, channels=3, crop=1, generator_rate=1e-2
)
DIGITS = {"classes": 10, "shape": SHAPE, "pixels": PIXELS["digits"]}


def mlp(hidden: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def normalising() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )


def seeded(make, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


@pytest.fixture(scope="module")
def digits():
    return load("digits", None)


@pytest.fixture(scope="module")
def clients(digits):
    """Two models from one start, one of the digits below 5, the other of the rest."""
    start, low = seeded(mlp, 0), digits.train.y < 5
    return [trained(start, digits.train.x[own], digits.train.y[own]) for own in (low, ~low)]


def trained(start, x, y):
    model, generator = copy.deepcopy(start), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(10):
        for at in torch.randperm(len(y), generator=generator).split(32):
            optimizer.zero_grad()
            cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return model


def accuracy(model, digits):
    with torch.no_grad():
        return float((model(digits.test.x).argmax(1) == digits.test.y).float().mean())


def test_a_student_that_saw_no_digit_beats_each_client(clients, digits):
    """From random weights and of another width: all that it knows is distilled."""
    student = seeded(lambda: mlp(48), 7)
    settings = DenseSettings(
        epochs=10,
        generator_steps=15,
        batch=64,
        latent=32,
        channels=8,
        generator_rate=1e-2,
        rate=0.1,
        crop=0,
        flip=False,
    )
    state = dense(clients, student=student, settings=settings, **DIGITS)
    before = accuracy(student, digits)
    student.load_state_dict(state)
    alone = [accuracy(model, digits) for model in clients]
    # Either client can be right on the half of the digits that it knows. 360 digits are tested:
    # .08 is three standard deviations of an accuracy's.
    assert max(alone) < 0.53 and before < 0.25
    assert accuracy(student, digits) > max(alone) + 0.08


def test_the_student_begins_at_the_weighted_mean(clients):
    settings = replace(QUICK, rate=1e-30)
    state = dense(clients, weights=[1, 3], settings=settings, **DIGITS)
    first, second = (model.state_dict() for model in clients)
    for name, found in state.items():
        wanted = (first[name].double() + 3 * second[name].double()) / 4
        assert torch.equal(found, wanted.float())


def test_a_seed_decides_everything(clients):
    torch.manual_seed(1)
    first = dense(clients, settings=QUICK, **DIGITS)
    torch.manual_seed(2)
    again = dense(clients, settings=QUICK, **DIGITS)
    other = dense(clients, settings=QUICK, seed=1, **DIGITS)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("own", [True, False])
def test_models_and_random_numbers_are_left_as_they_were(own):
    models = [seeded(normalising, seed) for seed in (0, 1)]
    models[1].eval()
    student = seeded(normalising, 2) if own else None
    everyone = [*models, *([student] if own else [])]
    kept = copy.deepcopy([model.state_dict() for model in everyone])
    modes = [model.training for model in everyone]
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    state = dense(models, student=student, settings=QUICK, **DIGITS)
    assert torch.equal(torch.rand(4), wanted)
    for model, before, training in zip(everyone, kept, modes, strict=True):
        assert model.training == training
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert state.keys() == kept[0].keys()
    assert all(value.isfinite().all() and not value.requires_grad for value in state.values())


def test_the_best_epoch_is_chosen(clients):
    seen, scores = [], iter([1.0, 3.0, 2.0, 3.0])

    def choose(state):
        seen.append(copy.deepcopy(dict(state)))
        return next(scores)

    settings = replace(QUICK, epochs=4)
    state = dense(clients, settings=settings, choose=choose, **DIGITS)
    assert len(seen) == 4
    assert all(torch.equal(state[name], seen[1][name]) for name in state)
    assert any(not torch.equal(state[name], seen[3][name]) for name in state)


def test_an_ensemble_is_the_weighted_mean_of_logits():
    models = [seeded(mlp, seed).double() for seed in (0, 1, 2)]
    x = torch.rand(3, *SHAPE, dtype=torch.float64)
    wanted = sum(p * model(x) for p, model in zip((0.5, 0.3, 0.2), models, strict=True))
    found = Ensemble(copy.deepcopy(models), (0.5, 0.3, 0.2))(x)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-14, atol=1e-14)


def test_batch_statistics_against_the_running_ones():
    """Layer by layer against channels taken one at a time; nothing without BatchNorm."""
    models = [seeded(normalising, seed).double().eval() for seed in (0, 1)]
    generator = torch.Generator().manual_seed(4)
    for model in models:
        for name in ("running_mean", "running_var"):
            values = torch.rand(4, generator=generator, dtype=torch.float64)
            setattr(model[1], name, values)
    x = torch.rand(6, *SHAPE, generator=generator, dtype=torch.float64)
    ensemble = Ensemble(models, (0.9, 0.1))
    with BatchStatistics(ensemble.models) as statistics:
        ensemble(x)
        found = statistics.loss()
    wanted = 0.0
    for model in models:
        maps = model[0](x)
        means = [float(maps[:, c].mean()) for c in range(4)]
        variances = [float(((maps[:, c] - means[c]) ** 2).mean()) for c in range(4)]
        for name, now in (("running_mean", means), ("running_var", variances)):
            before = getattr(model[1], name).tolist()
            wanted += math.dist(before, now) / 2
    assert float(found) == pytest.approx(wanted, rel=1e-12)
    plain = Ensemble([seeded(mlp, 0)], (1.0,))
    with BatchStatistics(plain.models) as statistics:
        plain(x.float())
        assert statistics.loss() == 0


def test_batches_like_the_training_data_lose_nothing():
    model = seeded(normalising, 0).double()
    model[1].momentum = 1.0  # the running statistics are those of the last batch
    x = torch.rand(7, *SHAPE, dtype=torch.float64)
    model(x)
    count = 7 * 36
    model[1].running_var *= (count - 1) / count  # it keeps the unbiased variance
    ensemble = Ensemble([model], (1.0,))
    with BatchStatistics(ensemble.models) as statistics:
        ensemble(x)
        assert float(statistics.loss()) < 1e-14


def test_boundary_support_counts_only_images_on_which_the_two_disagree():
    student = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    ensemble = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.5, 2.0]]).double()

    def softmax(row):
        total = sum(math.exp(value) for value in row)
        return [math.exp(value) / total for value in row]

    wanted = 0.0
    for row in (0, 2):  # of image 1, both say class 2
        q, p = softmax(student[row].tolist()), softmax(ensemble[row].tolist())
        wanted += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 3
    assert float(boundary_support(student, ensemble)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14), (1, 1, 3)])
def test_a_generator_makes_finite_images_of_any_size(shape):
    images = seeded(lambda: Generator(6, 2, shape), 0)(torch.randn(5, 6))
    assert images.shape == (5, *shape)
    assert images.isfinite().all() and images.min() >= 0 and images.max() <= 1


def test_augmented_images_are_moved_and_mirrored_as_said():
    """Each is one of all moves of its own image, and many of the moves occur."""
    torch.manual_seed(0)
    images = torch.rand(60, 2, 4, 3)
    found = augmented(images, 1, True)
    moves = set()
    for image, made in zip(images, found, strict=True):
        large = torch.zeros(2, 6, 5)
        large[:, 1:5, 1:4] = image
        fitting = [
            (down, right, mirror)
            for down in range(3)
            for right in range(3)
            for mirror in (False, True)
            if torch.equal(made.flip(-1) if mirror else made, large[:, down:, right:][:, :4, :3])
        ]
        assert len(fitting) == 1
        moves.update(fitting)
    assert len(moves) == 18
    assert torch.equal(augmented(images, 0, False), images)


def test_what_it_cannot_take_is_refused(clients):
    broken = copy.deepcopy(clients[1])
    with torch.no_grad():
        broken[1].bias[0] = torch.nan
    with pytest.raises(ValueError, match=r"models\[1\] must make finite logits"):
        dense([clients[0], broken], student=mlp(), settings=QUICK, **DIGITS)
    with pytest.raises(ValueError, match=r"finite logits \[2, 11\]"):
        dense(clients, classes=11, shape=SHAPE, settings=QUICK)
    with pytest.raises(ValueError, match=r"states\[1\]"):
        dense([clients[0], mlp(5)], settings=QUICK, **DIGITS)
    with pytest.raises(ValueError, match="at least one client"):
        dense([], settings=QUICK, **DIGITS)
    with pytest.raises(ValueError, match="weights"):
        dense(clients, weights=[1], settings=QUICK, **DIGITS)
    with pytest.raises(ValueError, match="shape must be"):
        dense(clients, classes=10, shape=(8, 8), settings=QUICK)


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("batch", 1), ("rate", 0.0), ("lambda2", -1.0), ("temperature", math.inf)],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"DenseSettings: {name} must be"):
        DenseSettings(**{name: value})
