"""PFNM recognises units, adds those that are new, and takes the most probable assignment."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from dpkernels.federated.merging.pfnm import pfnm
from dpkernels.federated.merging.unit_matching import Prior, global_units, match_units
from python_tests.federated.merging.networks_of_units import (
    CASES,
    built,
    convolutions,
    layers,
    mlp,
    permuted,
    records,
    widths,
)

ROUNDING = {"rtol": 1e-12, "atol": 1e-13}
# A global unit of m clients is shrunk by m / (m + sigma): at most so much in each of four layers,
# with outputs near 1. A small gamma, because equal units of small norm are not told apart from two
# that are new: matching gains only |v|^2 / sigma0.
SMALL = {"sigma": 1e-9, "gamma": 1e-3}
SHRUNK = {"rtol": 4e-9, "atol": 4e-9}


def drawn(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def probability(units, labels, j, prior):
    """Twice the log posterior, up to what does not depend on client j's labels, term by term."""
    total = 0.0
    others = [label for k, own in enumerate(labels) if k != j for label in own]
    for label in set(itertools.chain(*labels)):
        vectors = [
            units[k][at]
            for k, own in enumerate(labels)
            for at, other in enumerate(own)
            if other == label
        ]
        theta = sum(vectors) / prior.sigma / (1 / prior.sigma0 + len(vectors) / prior.sigma)
        total -= sum(float((v - theta) @ (v - theta)) / prior.sigma for v in vectors)
        total -= float(theta @ theta) / prior.sigma0
    new = 0
    for label in set(others):
        held = others.count(label) / len(labels)
        total += 2 * math.log(held if label in labels[j] else 1 - held)
    new = len(set(labels[j]) - set(others))
    return total + 2 * (new * math.log(prior.gamma / len(labels)) - math.log(math.factorial(new)))


def answers(others, count):
    """All ways to give ``count`` units one global unit each: known ones at most once, or new."""
    known = sorted(set(others))
    for chosen in itertools.product([*known, None], repeat=count):
        taken = [label for label in chosen if label is not None]
        if len(taken) == len(set(taken)):
            yield [label if label is not None else f"new {at}" for at, label in enumerate(chosen)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gamma", [0.01, 7.0])
def test_each_client_has_the_most_probable_assignment_given_the_others(seed, gamma):
    """Against every assignment, with densities and prior written out."""
    units = drawn(seed, (2, 2), (3, 2), (2, 2))
    prior = Prior(sigma=0.3, sigma0=2.0, gamma=gamma)
    found = [own.tolist() for own in match_units(units, prior)]
    for j, own in enumerate(units):
        others = [label for k, labels in enumerate(found) if k != j for label in labels]
        reached = probability(units, found, j, prior)
        best = max(
            probability(units, [*found[:j], answer, *found[j + 1 :]], j, prior)
            for answer in answers(others, len(own))
        )
        assert reached == pytest.approx(best, rel=1e-12)


def test_units_are_numbered_as_they_are_met():
    units = drawn(0, (3, 4), (2, 4), (3, 4))
    found = match_units(units, Prior(sigma=1e-6))  # nothing matches
    assert [own.tolist() for own in found] == [[0, 1, 2], [3, 4], [5, 6, 7]]


def test_the_order_of_clients_and_of_units_does_not_matter_where_the_answer_is_clear():
    """Noisy copies of some of six units that are far apart."""
    centres = 10 * torch.eye(6, dtype=torch.float64)
    kept = [[0, 1, 2], [3, 2, 1, 0], [5, 3], [4]]
    noise = drawn(1, *[(len(own), 6) for own in kept])
    units = [centres[own] + 0.1 * n for own, n in zip(kept, noise, strict=True)]
    prior = Prior(sigma=0.1, sigma0=10.0)
    for order in itertools.permutations(range(4)):
        found = match_units([units[k] for k in order], prior)
        truth = [unit for k in order for unit in kept[k]]
        labels = torch.cat(found).tolist()
        assert len(set(labels)) == 6
        assert len(set(zip(truth, labels, strict=True))) == 6


def test_a_global_unit_is_the_maximum_of_its_posterior():
    units = drawn(2, (2, 3), (2, 3))
    prior = Prior(sigma=0.5, sigma0=2.0)
    labels = [torch.tensor([0, 1]), torch.tensor([2, 0])]
    theta = global_units(units, labels, prior).requires_grad_()
    energy = (theta**2).sum() / prior.sigma0
    for own, at in zip(units, labels, strict=True):
        energy = energy + ((own - theta[at]) ** 2).sum() / prior.sigma
    (slope,) = torch.autograd.grad(energy, theta)
    torch.testing.assert_close(slope, torch.zeros_like(slope), **ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_a_permuted_copy_is_recovered(name):
    make, shape = CASES[name]
    model = built(make, 0)
    states = [m.state_dict() for m in (model, permuted(model, 1), permuted(model, 2))]
    matched, state = pfnm(model, states, **SMALL)
    assert widths(matched) == widths(model)
    x = records(shape)
    torch.testing.assert_close(matched(x).detach(), model(x).detach(), **SHRUNK)
    for key, wanted in states[0].items():
        torch.testing.assert_close(state[key], wanted, **SHRUNK)


def test_what_matches_is_shrunk_as_the_prior_says():
    """One hidden layer, three times the same client: theta = 3 v / (3 + sigma / sigma0)."""
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 0)
    state = model.state_dict()
    _, found = pfnm(model, [state] * 3, sigma=0.01, sigma0=0.5, gamma=1e-3)
    for key, factor in (("0.weight", 3 / 3.02), ("0.bias", 3 / 3.02), ("2.weight", 1.0)):
        torch.testing.assert_close(found[key], factor * state[key], **ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_units_that_nobody_shares_add_up_to_a_wider_network(name):
    """Its logits are the mean of the clients': here that of two networks side by side."""
    make, shape = CASES[name]
    first, second = built(make, 0), built(make, 1)
    matched, state = pfnm(first, [first.state_dict(), second.state_dict()], **SMALL)
    narrow = widths(first)
    assert widths(matched) == [2 * width for width in narrow[:-1]] + narrow[-1:]
    x = records(shape)
    wanted = (first(x) + second(x)).detach() / 2
    torch.testing.assert_close(matched(x).detach(), wanted, **SHRUNK)
    assert all(torch.equal(state[key], value) for key, value in matched.state_dict().items())


def test_some_units_match_and_the_rest_are_added():
    """The second client has two of the first one's four units, the third none of them."""
    make = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))  # noqa: E731
    models = [built(make, seed) for seed in (0, 1, 2)]
    with torch.no_grad():
        models[1][0].weight[[1, 3]] = models[0][0].weight[[2, 0]]
        models[1][0].bias[[1, 3]] = models[0][0].bias[[2, 0]]
    matched, _ = pfnm(models[0], [m.state_dict() for m in models], **SMALL)
    assert widths(matched) == [10, 2]
    x = records((3,))
    wanted = sum(m(x) for m in models).detach() / 3
    torch.testing.assert_close(matched(x).detach(), wanted, **SHRUNK)


def test_clients_may_have_widths_of_their_own():
    first, second = built(mlp, 0), built(lambda: mlp(9), 1)
    matched, _ = pfnm(first, [first.state_dict(), second.state_dict()], **SMALL)
    assert widths(matched) == [15, 10, 3]
    x = records((12,))
    wanted = (first(x) + second(x)).detach() / 2
    torch.testing.assert_close(matched(x).detach(), wanted, **SHRUNK)


@pytest.mark.parametrize(("most", "wanted"), [(100, [24, 15, 3]), (8, [8, 8, 3]), (1, [8, 5, 3])])
def test_a_width_has_a_bound_if_one_is_given(most, wanted):
    models = [built(lambda: mlp(8), seed) for seed in range(3)]
    matched, _ = pfnm(models[0], [m.state_dict() for m in models], sigma=1e-6, most=most)
    assert widths(matched) == wanted


def test_the_last_layer_is_averaged_class_by_class():
    model = built(lambda: nn.Sequential(nn.Linear(4, 3)), 0)
    states = [built(lambda: nn.Sequential(nn.Linear(4, 3)), s).state_dict() for s in (1, 2)]
    _, found = pfnm(model, states, class_counts=[[3, 0, 0], [1, 5, 0]])
    shares = torch.tensor([0.75, 0.0, 0.5], dtype=torch.float64)
    for key, value in found.items():
        share = shares.reshape(-1, *[1] * (value.ndim - 1))
        wanted = share * states[0][key] + (1 - share) * states[1][key]
        torch.testing.assert_close(value, wanted, **ROUNDING)


def test_inputs_are_left_as_they_were_and_dtypes_stay():
    model = built(convolutions, 0).float()
    states = [built(convolutions, s).float().state_dict() for s in (1, 2)]
    kept = copy.deepcopy([*states, model.state_dict()])
    matched, state = pfnm(model, states)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert widths(model) == [5, 4, 7, 3] and matched is not model
    for before, wanted in zip([*states, model.state_dict()], kept, strict=True):
        assert all(torch.equal(before[key], wanted[key]) for key in wanted)
    assert [layer.weight.requires_grad for layer in layers(matched)] == [True] * 4
    assert matched(records((2, 9, 8)).float()).isfinite().all()


def test_what_it_cannot_take_is_refused():
    model = built(mlp, 0)
    state = model.state_dict()
    with pytest.raises(ValueError, match="sigma must be finite and > 0, got 0"):
        pfnm(model, [state], sigma=0)
    with pytest.raises(ValueError, match="gamma must be"):
        pfnm(model, [state], gamma=math.inf)
    with pytest.raises(ValueError, match=r"class_counts must be .* \[1, 3\], got \[1, 2\]"):
        pfnm(model, [state], class_counts=[[1, 2]])
    with pytest.raises(ValueError, match=">= 0"):
        pfnm(model, [state], class_counts=[[1, 2, -1]])
    with pytest.raises(ValueError, match="at least one client"):
        pfnm(model, [])
    with pytest.raises(ValueError, match="most must be >= 1"):
        pfnm(model, [state], most=0)
    with pytest.raises(ValueError, match=r"pfnm: model must be .* LayerNorm is no layer"):
        pfnm(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), [state])
