"""Shrinkage by the noise that is known: formulas, the noise itself, and what the server does."""

from __future__ import annotations

import math

import pytest
import torch

from dpkernels.federated import Layer, Message, Seen, UDPFedAvg
from dpkernels.federated.algorithms.local_training import LocalTraining
from dpkernels.federated.folding import fold, unfold
from dpkernels.federated.shrinking import (
    james_stein,
    shrunken,
    spectral,
)
from python_tests.federated.cases import federation, finish, network, sampler, terms, watched

LAYERS = (
    Layer("0.weight", 0, (6, 3, 2, 2)),
    Layer("0.bias", 72, (6,)),
    Layer("1.weight", 78, (5, 6)),
)
SIZE = 108


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_fold_has_the_shapes_of_the_paper_and_unfold_is_its_inverse():
    uploads = normal(4, SIZE)
    folded = fold(LAYERS, uploads)
    assert [tuple(x.shape) for x in folded] == [(12, 6, 4), (1, 6, 4), (6, 5, 4)]
    weight = uploads[2, :72].view(6, 3, 2, 2)
    assert torch.equal(folded[0][:, :, 2], weight.permute(1, 2, 3, 0).reshape(12, 6))
    assert torch.equal(folded[2][:, :, 1], uploads[1, 78:].view(5, 6).T)
    assert torch.equal(unfold(LAYERS, folded, torch.zeros_like(uploads)), uploads)
    some = unfold(LAYERS[1:2], folded[1:2], torch.zeros_like(uploads))
    assert torch.equal(some[:, 72:78], uploads[:, 72:78]) and not some[:, :72].any()


@pytest.mark.parametrize("variance", [0.0, 0.1, 0.9, 1.1, 5.0])
def test_james_stein_is_its_formula(variance):
    values = normal(50)
    wanted = max(0.0, 1 - 48 * variance / values.square().sum().item())
    assert james_stein(values, variance) == pytest.approx(wanted)


def test_james_stein_never_enlarges_short_vectors_and_takes_zero():
    assert james_stein(torch.ones(1), 5.0) == james_stein(torch.ones(2), 5.0) == 1.0
    assert james_stein(torch.zeros(9), 1.0) == 0.0


@pytest.mark.parametrize("shape", [(40, 10), (10, 40), (25, 25)])
@pytest.mark.parametrize("variance", [0.01, 1.0])
def test_the_spectral_shrinker_is_gavish_and_donohos(shape, variance):
    signal = 3 * normal(shape[0], 2) @ normal(2, shape[1], seed=1)
    matrix = signal + math.sqrt(variance) * normal(*shape, seed=2)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    # As published: y = s / sqrt(n v), beta = m / n, eta = sqrt((y^2 - beta - 1)^2 - 4 beta) / y.
    m, n = min(shape), max(shape)
    y, beta = s / math.sqrt(n * variance), m / n
    inside = ((y**2 - beta - 1) ** 2 - 4 * beta).clamp(min=0).sqrt() / y
    eta = torch.where(y >= 1 + math.sqrt(beta), inside, 0.0) * math.sqrt(n * variance)
    found = spectral(matrix, variance)
    torch.testing.assert_close(found, (u * eta) @ vh, rtol=1e-8, atol=1e-8)
    assert (found - signal).norm() < 0.8 * (matrix - signal).norm()


def test_pure_noise_is_below_the_edge():
    assert not spectral(normal(200, 60), 1.2**2).any()
    assert not shrunken("scalar", LAYERS, normal(SIZE), 1.5).any()


def test_each_layer_has_a_factor_of_its_own_and_all_one_in_common():
    values = normal(SIZE)
    values[:72] *= 10
    by_layer = shrunken("layer", LAYERS, values, 0.5)
    for layer in LAYERS:
        part = slice(layer.begin, layer.begin + math.prod(layer.shape))
        wanted = values[part] * james_stein(values[part], 0.5)
        torch.testing.assert_close(by_layer[part], wanted)
    whole = shrunken("scalar", LAYERS, values, 0.5)
    torch.testing.assert_close(whole, values * james_stein(values, 0.5))
    split = shrunken("spectral", LAYERS, values, 0.5)
    bias = values[72:78]
    torch.testing.assert_close(split[72:78], bias * james_stein(bias, 0.5))
    matrix = values[78:].view(5, 6).T
    torch.testing.assert_close(split[78:].view(5, 6).T, spectral(matrix, 0.5))


@pytest.mark.parametrize("kind", ["none", "energy", "scalar", "layer", "spectral"])
def test_without_noise_nothing_is_shrunk(kind):
    values = normal(SIZE)
    assert torch.equal(shrunken(kind, LAYERS, values, 0.0), values)


def test_the_problems_layers_reach_the_server():
    held = network()
    run = federation(UDPFedAvg(), held, terms(held, "user", layers=()))
    assert run.terms.layers == held.layers and run.terms.cohort == 5.0


def mean_deviations(view, kind, lost, rounds=60):
    """Return the deviation of the mean of empty clients, over what the server is told of it."""
    told_std, means = [], []

    class Noting(UDPFedAvg):
        def server(self, stage, terms, server, seen):
            told_std.append(seen.std)
            means.append(seen.mean.double())
            return super().server(stage, terms, server, seen)

    def lossy(index, ids, uploads):
        sent = zip(ids.tolist(), uploads, strict=True)
        return [Message(i, index, values) for i, values in sent][lost:]

    held = network((0,) * 8)
    replaced = "add-remove" if kind == "poisson" else "replace-one"
    told = terms(held, "user", view, rounds=rounds, adjacency=replaced)
    options = {"sampler": sampler(kind, 8, 4)} if kind else {}
    if kind and view == "aggregate":
        options["accountant"] = "rdp"
    if view == "aggregate" and kind != "poisson":
        options["max_dropouts"] = lost
    run = federation(Noting(), held, told, transport=lossy, **options)
    finish(run)
    ratios = [(mean / std).square() for mean, std in zip(means, told_std, strict=True) if std]
    return torch.stack(ratios)


@pytest.mark.parametrize(
    ("view", "kind", "lost"),
    [
        ("aggregate", None, 0),
        ("aggregate", None, 2),
        ("aggregate", "fixed", 1),
        ("aggregate", "poisson", 0),
        ("each_upload", None, 0),
        ("each_upload", None, 3),
        ("each_upload", "fixed", 1),
    ],
)
def test_the_server_is_told_the_deviation_of_the_noise_in_its_mean(view, kind, lost):
    squares = mean_deviations(view, kind, lost)
    assert abs(squares.mean().item() - 1) < 5 * math.sqrt(2 / squares.numel())


def test_uploads_made_of_releases_have_no_deviation_to_tell():
    from dpkernels.federated import LocalDPSGD

    seen_std = []

    class Noting(LocalDPSGD):
        def server(self, stage, terms, server, seen):
            seen_std.append(seen.std)
            return super().server(stage, terms, server, seen)

    held = network()
    finish(federation(Noting(local_steps=2), held, terms(held, "record", "each_upload")))
    assert seen_std == [None] * 3


def stepped(algorithm, means, std):
    """Return the server's states over rounds in which it sees ``means``."""
    held = network(dtype=torch.float64)
    told = terms(held, "user")
    stage = algorithm.stages(told)[0]
    states = [algorithm.server_start(told, held.initial())]
    for mean in means:
        states.append(algorithm.server(stage, told, states[-1], Seen(mean, std)))
    return held, told, states


def rounds_of(count, seed=0):
    return [normal(43, seed=seed + index) for index in range(count)]


def test_the_sum_is_kept_as_it_is_and_shrunk_by_the_noise_of_all_rounds():
    means, std, lr = rounds_of(6), 0.7, 0.3
    held, told, states = stepped(UDPFedAvg(lr=lr, shrink="layer"), means, std)
    for t in range(1, 7):
        moved = lr * torch.stack(means[:t]).sum(0)
        wanted = held.initial() + shrunken("layer", told.layers, moved, (lr * std) ** 2 * t)
        torch.testing.assert_close(states[t]["theta"], wanted)


@pytest.mark.parametrize("shrunk", ["sum", "update"])
def test_momentum_and_decay_have_the_noise_that_linear_algebra_says(shrunk):
    algorithm = UDPFedAvg(lr=0.5, momentum=0.8, decay=0.9, shrink="scalar", shrunk=shrunk)
    _, _, states = stepped(algorithm, [normal(43) for _ in range(7)], 2.0)
    # v and M as matrices that act on the noise of seven rounds.
    velocity, total = torch.zeros(7), torch.zeros(7)
    for t in range(7):
        velocity = 0.8 * velocity
        velocity[t] += 1
        total = total + 0.5 * 0.9**t * velocity
    of_velocity, _, of_sum = states[-1]["noise"].tolist()
    assert of_velocity == pytest.approx(4 * velocity.square().sum().item(), rel=1e-5)
    assert of_sum == pytest.approx(4 * total.square().sum().item(), rel=1e-5)


def test_without_shrinkage_the_server_is_momentum_descent():
    means = rounds_of(4)
    held, _, states = stepped(UDPFedAvg(lr=0.2, momentum=0.5, decay=0.5), means, 1.0)
    theta, velocity = held.initial(), torch.zeros(43)
    for t, mean in enumerate(means):
        velocity = 0.5 * velocity + mean
        theta = theta + 0.2 * 0.5**t * velocity
        torch.testing.assert_close(states[t + 1]["theta"], theta)


def test_the_filter_has_the_gain_of_its_innovations():
    signal, std, rounds = 0.05 * normal(43, seed=99), 1.0, 400
    means = [signal + std * noise for noise in rounds_of(rounds)]
    algorithm = UDPFedAvg(lr=1.0, shrink="scalar", shrunk="filtered")
    _, _, states = stepped(algorithm, means, std)
    estimate, excess = torch.zeros(43, dtype=torch.float64), 0.0
    for t, mean in enumerate(means, 1):
        innovation = mean - estimate
        excess += innovation.square().mean().item() - std**2
        prior = max(0.0, excess / t)
        estimate = estimate + prior / (prior + std**2) * innovation
    torch.testing.assert_close(states[-1]["velocity"], estimate)
    # It is nearer to the signal than what a round shows of it.
    assert (estimate - signal).norm() < 0.5 * (means[-1] - signal).norm()


@pytest.mark.parametrize("shrunk", ["sum", "update", "filtered"])
def test_without_noise_every_form_is_plain_averaging(shrunk):
    held = network()
    told = terms(held, "user")
    plain, other = (
        finish(federation(UDPFedAvg(shrink=shrink, shrunk=shrunk), held, told, epsilon=None))
        for shrink in ("none", "layer")
    )
    torch.testing.assert_close(plain.model(), other.model())


def test_an_upload_is_the_clipped_way_of_local_training():
    held = network(dtype=torch.float64)
    algorithm = UDPFedAvg(lr=1.0, clip=0.05, local_epochs=2, local_batch=3)
    run = federation(algorithm, held, terms(held, "user"), epsilon=None)
    seeds = []
    updates = held.local_updates

    def noting(cohort, theta, local, given):
        seeds.append(given)
        return updates(cohort, theta, local, given)

    held.local_updates = noting
    uploads, theta = watched(run), run.model().clone()
    run.round()
    moved = updates(held.cohort(torch.arange(5)), theta, algorithm.local, seeds[0])
    norms = moved.norm(dim=1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(uploads[0][1], moved * (0.05 / norms).clamp(max=1))
    torch.testing.assert_close(run.model(), theta + uploads[0][1].sum(0) / 5)
    assert isinstance(algorithm, LocalTraining) and len(seeds[0].unique()) == 5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"shrink": "magic"}, "shrink must be one of none, energy"),
        ({"shrunk": "magic"}, "shrunk must be one of sum"),
        ({"shrink": "spectral", "shrunk": "filtered"}, "is for shrink='scalar' or 'layer'"),
        ({"shrink": "layer", "shrunk": "filtered", "momentum": 0.5}, "without momentum"),
        ({"decay": 0.0}, "decay must be in"),
        ({"local_epochs": 0}, "epochs and batch_size must be >= 1"),
        ({"local_lr": -1.0}, "lr must be"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        UDPFedAvg(**wrong)


def test_energy_leaves_the_length_that_the_signal_is_expected_to_have():
    variance = 0.25
    signal = 0.05 * normal(200_000)
    values = signal + math.sqrt(variance) * normal(200_000, seed=1)
    found = shrunken("energy", (), values, variance)
    # |values|^2 - n v estimates |signal|^2 with standard deviation v sqrt(2 n).
    slack = 5 * variance * math.sqrt(2 * len(values))
    assert abs(found.square().sum() - signal.square().sum()) < slack
    direction = found / values
    torch.testing.assert_close(direction, direction[:1].expand_as(direction))
