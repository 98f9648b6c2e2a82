"""The records of synthetic(alpha, beta) have the distribution that its docstring states."""

from __future__ import annotations

import pytest
import torch

from dpkernels.federated.synthetic import generate


def by_client(drawn):
    """Return x [clients, records, features] and y [clients, records] of the training part."""
    clients = drawn.partition.clients
    return drawn.x.unflatten(0, (clients, -1)).double(), drawn.y.unflatten(0, (clients, -1))


def test_shapes_parts_and_sizes_of_clients():
    drawn = generate(clients=7, records=50, features=6, classes=4)
    assert drawn.x.shape == (280, 6) and drawn.x.dtype == torch.float32
    assert drawn.y.shape == (280,) and drawn.y.dtype == torch.int64
    assert drawn.x_test.shape == (70, 6) and drawn.y_test.shape == (70,)
    assert drawn.partition.sizes.tolist() == [40] * 7
    assert min(drawn.y.min(), drawn.y_test.min()) >= 0 and drawn.y.max() < 4
    default = generate(clients=2)
    assert default.x.shape == (800, 60) and default.x_test.shape == (200, 60)


def test_test_records_of_a_client_are_around_its_own_mean():
    drawn = generate(clients=5, records=400)
    test = drawn.x_test.unflatten(0, (5, -1)).double().mean(1)
    train = by_client(drawn)[0].mean(1)
    distances = torch.cdist(test, train)
    assert distances.argmin(1).tolist() == list(range(5)) and distances.diag().max() < 1


def test_features_have_the_variance_j_to_the_minus_1_2_around_their_clients_mean():
    x, _ = by_client(generate(clients=40, records=1000, seed=1))
    variances = x.var(1).mean(0)
    expected = torch.arange(1, 61).double() ** -1.2
    # 32,000 records: the standard error of a variance is 0.8% of it.
    torch.testing.assert_close(variances, expected, rtol=0.04, atol=0)
    first, second = (x[:, :, j] - x[:, :, j].mean(1, keepdim=True) for j in (0, 1))
    assert abs((first * second).mean() / expected[:2].prod().sqrt()) < 0.03


@pytest.mark.parametrize("beta", [0.0, 5.0])
def test_means_of_clients_have_the_variance_beta_plus_1_in_every_coordinate(beta):
    x, _ = by_client(generate(beta=beta, clients=400, records=40))
    means = x.mean(1)
    assert means.var().item() == pytest.approx(beta + 1, rel=0.05)
    # An offset of each coordinate, not one of all: coordinates of a client are uncorrelated.
    assert means.mean(1).var().item() == pytest.approx((beta + 1) / 60, rel=0.3)


def test_labels_before_some_are_redrawn_are_a_linear_model_of_the_client():
    drawn = generate(clients=3, records=2000, features=4, classes=2, relabelled=0.0, seed=5)
    x, y = by_client(drawn)
    for features, labels in zip(x, y, strict=True):
        # Two classes are apart by a plane, which Newton's method on a logistic loss finds.
        inputs = torch.cat([features, torch.ones(len(features), 1).double()], 1)
        plane = torch.zeros(5).double()
        for _ in range(30):
            p = torch.sigmoid(inputs @ plane)
            hessian = inputs.T @ (inputs * (p * (1 - p)).unsqueeze(1)) + 1e-6 * torch.eye(5)
            plane -= torch.linalg.solve(hessian, inputs.T @ (p - labels) + 1e-6 * plane)
        assert ((inputs @ plane > 0).long() == labels).double().mean() > 0.995


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_so_many_labels_are_drawn_anew(share):
    clean, noisy = (
        generate(clients=50, records=1000, relabelled=relabelled) for relabelled in (0.0, share)
    )
    assert torch.equal(clean.x, noisy.x)
    changed = (clean.y != noisy.y).double().mean().item()
    assert changed == pytest.approx(0.9 * share, rel=0.05)  # one of ten classes is the old one
    counts = noisy.y[clean.y != noisy.y].bincount(minlength=10).double()
    assert counts.min() > 0.5 * counts.mean()


def test_alpha_scales_all_scores_of_a_client_so_that_no_record_depends_on_it():
    one, other = (generate(alpha, clients=20, records=100, seed=2) for alpha in (0.0, 5.0))
    assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


def test_the_seed_decides():
    first, again, other = (generate(clients=3, records=20, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)
    generator = torch.Generator().manual_seed(1)
    drawn = [generate(clients=3, records=20, seed=generator).x for _ in range(2)]
    assert not torch.equal(*drawn)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alpha": -1.0}, "synthetic: alpha must be a finite number >= 0, got -1.0"),
        ({"beta": float("nan")}, "synthetic: beta must be a finite number >= 0, got nan"),
        ({"clients": 0}, "synthetic: clients must be an integer >= 1, got 0"),
        ({"classes": 0}, "synthetic: classes must be an integer >= 1, got 0"),
        ({"relabelled": 1.5}, r"relabelled must be a share in \[0, 1\], got 1.5"),
        ({"test_share": 0.0}, r"test_share must be in \(0, 1\) and leave .*got 0.0"),
        ({"records": 2}, "leave some of a client's 2 records in both parts, got 0.2"),
    ],
)
def test_what_is_out_of_range_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        generate(**given)
