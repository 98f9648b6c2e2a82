"""Local training of many clients at once gives each what plain SGD gives it alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpkernels.federated import LocalSGD, ModelProblem
from dpkernels.federated.local import chain_of, stacked_updates
from dpkernels.federated.local.chance import Masks, orders_of
from dpkernels.federated.models import cnn5x5, lenet, lenet5, lstm, mlp

COUNTS = (7, 0, 1, 12, 5, 12)
FEATURES, CLASSES = 6, 3
TIGHT = {"rtol": 1e-9, "atol": 1e-11}  # float64: batched products add up in another order


def plain():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def deep():
    return nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Tanh(), nn.Linear(FEATURES, 5, bias=False), nn.Tanh(), nn.ReLU()),
        nn.Sequential(nn.Identity(), nn.Linear(5, 4), nn.Tanh(), nn.Tanh()),
        nn.Linear(4, CLASSES),
    )


def three():
    return nn.Sequential(
        nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)
    )


def dropping():
    return nn.Sequential(
        nn.Dropout(0.1),
        nn.Linear(FEATURES, 5),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(5, CLASSES, bias=False),
    )


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 3, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def linear():
    return nn.Linear(FEATURES, CLASSES)


MODELS = {
    "plain": plain,
    "deep": deep,
    "three": three,
    "linear": linear,
    "mlp": lambda: mlp(FEATURES, CLASSES, hidden=5),
    "dropping": dropping,
    "convolutions": convolutions,
}


def problem_of(name, counts=COUNTS, *, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    generator = torch.Generator().manual_seed(1)
    total = sum(counts)
    x = torch.randn(total, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    if name == "convolutions":
        x = x.view(total, 1, 2, 3)
    y = torch.randint(CLASSES, (total,), generator=generator)
    parts = list(torch.randperm(total, generator=generator).split(counts))
    return ModelProblem(model, x, y, parts, x, y, **options)


def plain_sgd(problem, rows, theta, local, seed):
    """Return w - theta by ``torch.optim.SGD``; the model must draw nothing."""
    model = copy.deepcopy(problem.model)
    vector_to_parameters(theta.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, momentum=local.momentum)
    orders = torch.Generator().manual_seed(seed)
    for _ in range(local.epochs):
        order = rows[torch.randperm(len(rows), generator=orders)]
        for begin in range(0, len(rows), local.batch_size):
            part = order[begin : begin + local.batch_size]
            optimizer.zero_grad()
            cross_entropy(model(problem._x[part]), problem._y[part]).backward()
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach() - theta


def starts_of(problem, clients, *, own):
    theta = problem.initial()
    if not own:
        return theta
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(clients, *problem.shape, generator=generator, dtype=torch.float64)
    return theta + 0.1 * noise.to(theta.dtype)


@pytest.mark.parametrize("own", [False, True], ids=["one start", "own starts"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("plain", "stacked"),
        ("plain", "vmapped"),
        ("plain", "looped"),
        ("deep", "stacked"),
        ("linear", "stacked"),
        ("convolutions", "vmapped"),
        ("convolutions", "looped"),
    ],
)
def test_every_client_takes_the_steps_of_plain_sgd(name, way, epochs, momentum, own):
    problem = problem_of(name, local=way)
    cohort = problem.cohort(torch.arange(len(COUNTS)))
    theta = starts_of(problem, len(COUNTS), own=own)
    seeds = torch.arange(10, 10 + len(COUNTS))
    local = LocalSGD(epochs, 5, 0.3 * (1 - momentum), momentum)
    found = problem.local_updates(cohort, theta, local, seeds)
    for i, rows in enumerate(cohort.held):
        start = theta[i] if own else theta
        wanted = plain_sgd(problem, rows, start, local, int(seeds[i]))
        torch.testing.assert_close(found[i], wanted, **TIGHT)
        assert len(rows) == 0 or found[i].abs().max() > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["plain", "mlp", "three"])
def test_coefficients_of_records_are_the_same_training(name, momentum):
    problem = problem_of(name)
    cohort, theta = problem.cohort(torch.arange(len(COUNTS))), problem.initial()
    local, seeds = LocalSGD(3, 5, 0.3 * (1 - momentum), momentum), list(range(len(COUNTS)))
    chain = chain_of(problem.model, (FEATURES,))
    held = cohort.held
    by_weights, by_coefficients = (
        stacked_updates(chain, problem._x, problem._y, held, theta, local, seeds, gram)
        for gram in (None, lambda i: problem._grams.of(i, held[i]))
    )
    torch.testing.assert_close(by_coefficients, by_weights, **TIGHT)


@pytest.mark.parametrize("way", ["stacked", "vmapped", "looped"])
def test_velocity_lives_as_long_as_the_epochs_of_a_round(way):
    problem = problem_of("plain", (5, 5), local=way)
    cohort, theta = problem.cohort(torch.arange(2)), problem.initial()
    one_batch, seeds = LocalSGD(1, 5, 0.1, 0.9), torch.arange(2)
    first = problem.local_updates(cohort, theta, one_batch, seeds)
    again = problem.local_updates(cohort, theta + first, one_batch, seeds)
    both = problem.local_updates(cohort, theta, replace(one_batch, epochs=2), seeds)
    # Its first step is no gradient's but the velocity's: 0.9 of what the first epoch added.
    torch.testing.assert_close(both, first + again + 0.9 * first, **TIGHT)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_momentum_is_at_least_zero_and_less_than_one(momentum):
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        LocalSGD(momentum=momentum)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("plain", "stacked"),
        ("mlp", "stacked"),
        ("mlp", "looped"),
        ("dropping", "stacked"),
        ("dropping", "looped"),
        ("convolutions", "vmapped"),
    ],
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_gets_the_same_among_others_and_alone(name, way, momentum):
    problem = problem_of(name, local=way)
    clients = len(COUNTS)
    cohort, seeds = problem.cohort(torch.arange(clients)), torch.arange(clients) * 7919 - 3
    local = LocalSGD(3, 5, 0.3 * (1 - momentum), momentum)
    together = problem.local_updates(cohort, problem.initial(), local, seeds)
    for i in range(clients):
        own = slice(i, i + 1)
        alone = problem.local_updates(problem.only(cohort, i), problem.initial(), local, seeds[own])
        torch.testing.assert_close(together[own], alone, **TIGHT)
    assert torch.equal(together[1], torch.zeros_like(together[1]))


def test_another_seed_is_another_order_and_other_masks():
    problem = problem_of("mlp", (12, 12))
    cohort, local = problem.cohort(torch.tensor([0])), LocalSGD(1, 12, 0.3)
    # One batch: the order matters only through the masks.
    one, same, other = (
        problem.local_updates(cohort, problem.initial(), local, torch.tensor([seed]))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.1, 0.0, 1.0])
def test_masks_keep_their_share_and_their_mean(rate):
    masks = Masks([3, 4], [4000, 1000], 4000, [16], [rate], torch.empty(0))
    first = masks.next_epoch()[0][0].clone()
    second = masks.next_epoch()[0][0]
    kept = (first > 0).double().mean().item()
    assert abs(kept - (1 - rate)) < 0.01  # five deviations at 64,000 draws
    if rate < 1:
        # What is realised is a multiple of 2^-16; the scale is one over just that.
        assert first.max().item() == pytest.approx(1 / (1 - rate), rel=1e-4)
    if 0 < rate < 1:
        assert not torch.equal(first, second)
        assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.02


def test_masks_are_not_the_stream_of_the_orders():
    masks = Masks([3], [64], 64, [8], [0.5], torch.empty(0)).next_epoch()[0]
    raw = torch.empty(64, dtype=torch.int64).random_(-(2**63), None, generator=orders_of(3))
    assert not torch.equal(masks[0] > 0, raw.view(torch.uint8).view(64, 8) < 128)


@pytest.fixture
def _poisoned(monkeypatch):
    new_empty = torch.Tensor.new_empty

    def nan(self, *shape, **options):
        found = new_empty(self, *shape, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", nan)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("name", ["plain", "deep", "mlp", "dropping"])
def test_padding_cannot_leak(name, epochs, momentum):
    # A client that is all NaN is its neighbours' padding if anything is.
    clean, broken = problem_of(name), problem_of(name)
    broken._x[broken._parts[3]] = torch.nan
    others = torch.tensor([0, 1, 2, 4, 5])
    local, seeds = LocalSGD(epochs, 5, 0.3, momentum), torch.arange(len(COUNTS))
    found = [
        p.local_updates(p.cohort(torch.arange(len(COUNTS))), p.initial(), local, seeds)
        for p in (clean, broken)
    ]
    assert found[0].isfinite().all()
    assert torch.equal(found[0][others], found[1][others])
    assert not found[1][3].isfinite().all()
    sums = [
        p.clipped_gradient_sums(p.cohort(torch.arange(len(COUNTS))), p.initial(), 0.5)
        for p in (clean, broken)
    ]
    assert sums[1].isfinite().all()
    assert torch.equal(sums[1][3], torch.zeros_like(sums[1][3]))
    if "drop" not in name and name != "mlp":
        assert torch.equal(sums[0][others], sums[1][others])


def test_nobody_trains_where_nobody_has_records():
    problem = problem_of("mlp", (0, 0, 4))
    for way in ("stacked", "looped"):
        problem._way = way
        cohort = problem.cohort(torch.arange(2))
        found = problem.local_updates(cohort, problem.initial(), LocalSGD(), torch.arange(2))
        assert torch.equal(found, torch.zeros(2, *problem.shape, dtype=torch.float64))
        nobody = problem.cohort(torch.arange(0))
        none = problem.local_updates(nobody, problem.initial(), LocalSGD(), torch.arange(0))
        assert none.shape == (0, *problem.shape)


def test_records_drawn_by_chance_are_not_taken_for_the_whole_client():
    problem = problem_of("plain", (12, 12))
    whole = problem.cohort(torch.arange(2))
    local, seeds = LocalSGD(5, 4, 0.1, 0.5), torch.arange(2)
    problem._grams.keeps = True
    for i in range(2):
        problem._grams.of(i, whole.held[i])
    drawn = type(whole)(whole.ids, [rows[::4] for rows in whole.held])
    assert problem.local_plan(drawn, local).spanned
    found = problem.local_updates(drawn, problem.initial(), local, seeds)
    for i, rows in enumerate(drawn.held):
        wanted = plain_sgd(problem, rows, problem.initial(), local, i)
        torch.testing.assert_close(found[i], wanted, **TIGHT)


def test_the_plan_names_its_way_and_why():
    local, ten = LocalSGD(30, 64), [500] * 10

    def plan(model, shape, counts=ten, local=local, **options):
        from dpkernels.federated.local import plan_of

        return plan_of(model, shape, local, counts, **options)

    by_span = plan(mlp(784, 26), (1, 28, 28))
    assert (by_span.way, by_span.spanned) == ("stacked", True)
    assert "coefficients of at most 500 records" in str(by_span)
    heavy = plan(mlp(784, 26), (784,), local=replace(local, momentum=0.9))
    assert heavy.spanned and "compiled epochs have no momentum" in heavy.reason
    assert "momentum" not in by_span.reason
    once = plan(mlp(784, 26), (784,), local=LocalSGD(1, 64))
    assert (once.way, once.spanned) == ("stacked", False) and "by its weights" in once.reason
    many = plan(mlp(784, 26), (784,), [6000] * 10)
    assert not many.spanned
    conv = plan(nn.Sequential(nn.Sigmoid(), lenet5(10)), (3, 32, 32))
    assert conv.way == "looped" and "MFlop" in conv.reason and "Sigmoid" in conv.reason
    small = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 10))
    mapped = plan(small, (1, 8, 8), local=LocalSGD(1, 8))
    assert mapped.way == "vmapped" and "shared by 10" in mapped.reason
    assert plan(small, (1, 8, 8), [9, 0], local=LocalSGD(1, 8)).way == "looped"
    tokens = plan(lstm(50, 2), (64,))
    assert tokens.way == "looped" and "LSTM" in tokens.reason
    other = plan(mlp(784, 26), (784,), cross_entropy=False)
    assert other.way == "looped" and "loss" in other.reason
    with pytest.raises(ValueError, match=r"stacked does not take this model: .*; it can be looped"):
        plan(lstm(50, 2), (64,), asked="stacked")
    with pytest.raises(ValueError, match="must be one of stacked, chained, vmapped, looped"):
        plan(mlp(784, 26), (784,), asked="fast")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "end with a Linear"),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), "GELU"),
        (nn.Sequential(*[nn.Linear(4, 4)] * 2), "used twice"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(4, 4)), "Flatten"),
    ],
    ids=["end", "gelu", "twice", "flatten"],
)
def test_what_is_no_chain_says_why(model, why):
    assert why in chain_of(model, (4,))


def test_frozen_and_hooked_and_unflat_models_are_no_chains():
    model = nn.Sequential(nn.Linear(4, 4))
    assert "not flat" in chain_of(model, (2, 4))
    model.register_forward_hook(lambda *_: None)
    assert "hooks" in chain_of(model, (4,))
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    frozen[0].weight.requires_grad_(False)
    assert "not trained" in chain_of(frozen, (4,))


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (mlp(784, 26), 784 * 64 + 64 * 26),
        (lenet5(10), 1_141_194),
        (lstm(100, 2), 39_810),
        (lenet(10), 44_190),
        (cnn5x5(10), 939_616),
    ],
    ids=["mlp", "lenet5", "lstm", "lenet", "cnn5x5"],
)
def test_the_papers_models_have_their_sizes(model, parameters):
    assert sum(p.numel() for p in model.parameters()) == parameters
