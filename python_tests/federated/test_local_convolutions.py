"""Compiled local training of convolutional networks gives each client what plain SGD gives it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpkernels import backend
from dpkernels.federated import LocalSGD, ModelProblem
from dpkernels.federated.local import network_of, plan_of
from dpkernels.federated.local.chance import Levels, orders_of
from dpkernels.federated.models import cnn5x5, lenet, lenet5

pytestmark = pytest.mark.skipif(backend.extension is None, reason="dpkernels._C is not built")

COUNTS = (7, 0, 1, 12, 5, 12)
CLASSES = 3
IMAGE = (2, 9, 8)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}  # float64: sums are added up in another order


def pooled():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 4, 2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 7),
        nn.ReLU(),
        nn.Linear(7, CLASSES),
    )


def strided():
    return nn.Sequential(
        nn.Conv2d(2, 17, (3, 2), stride=(2, 1), padding=(1, 0)),
        nn.Tanh(),
        nn.Identity(),
        nn.Conv2d(17, 6, 3, padding="same"),
        nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(6 * 5 * 7, CLASSES, bias=False)),
    )


def overlapping():
    """Pools that overlap and are padded, before the activation, and a pool of the records."""
    return nn.Sequential(
        nn.MaxPool2d(2, 1),
        nn.Conv2d(2, 5, 3, padding=1),
        nn.MaxPool2d(3, 2, 1),
        nn.ReLU(),
        nn.Tanh(),
        nn.Conv2d(5, 33, 1),
        nn.ReLU(),
        nn.MaxPool2d((2, 1)),
        nn.Flatten(),
        nn.Linear(33 * 2 * 4, CLASSES),
    )


def to_a_pixel():
    """Images of one pixel between convolutions are images still."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (9, 8)),
        nn.Tanh(),
        nn.Tanh(),
        nn.Conv2d(4, 5, 3, padding=1),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(5, CLASSES),
    )


def only_linear():
    return nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(2 * 9 * 8, 6), nn.Linear(6, CLASSES))


def dropping():
    return nn.Sequential(
        nn.Dropout(0.25),
        nn.Conv2d(2, 5, 3),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5 * 3 * 3, 7),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(7, CLASSES),
    )


MODELS = {f.__name__: f for f in (pooled, strided, overlapping, to_a_pixel, only_linear, dropping)}
EXACT = [name for name in MODELS if name != "dropping"]


def problem_of(name, *, dtype=torch.float64, counts=COUNTS, way="chained"):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    generator = torch.Generator().manual_seed(1)
    total = sum(counts)
    x = torch.randn(total, *IMAGE, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(CLASSES, (total,), generator=generator)
    parts = list(torch.randperm(total, generator=generator).split(counts))
    return ModelProblem(model, x, y, parts, x, y, local=way)


class GivenDropout(nn.Module):
    """Dropout whose masks are given, one batch after the other."""

    def __init__(self, masks):
        super().__init__()
        self.masks = masks

    def forward(self, x):
        return x * next(self.masks).view_as(x)


def with_given_masks(problem, rows, local, seed):
    """Return the problem's model with the masks that the client's seed draws."""
    model = copy.deepcopy(problem.model)
    rates = [m.p for m in model if isinstance(m, nn.Dropout)]
    shapes = [(2, 9, 8), (5, 7, 6), (7, 1, 1)]
    levels = [256 if rate != 0.3 else 65536 for rate in rates]
    widths = [c * h * w for c, h, w in shapes]
    drawn = Levels([seed], [len(rows)], len(rows), widths, levels)
    masks = [[] for _ in rates]
    for _ in range(local.epochs):
        for own, table, rate, shape, count in zip(
            masks, drawn.next_epoch(), rates, shapes, levels, strict=True
        ):
            kept = round(count * (1 - rate))
            mask = (table[0].to(torch.int64) < kept).double() * (count / kept)
            mask = mask.view(-1, shape[1], shape[2], shape[0]).permute(0, 3, 1, 2)
            own.extend(mask.split(local.batch_size))
    given = iter(masks)
    modules = [GivenDropout(iter(next(given))) if type(m) is nn.Dropout else m for m in model]
    return nn.Sequential(*modules)


def plain_sgd(problem, model, rows, theta, local, seed):
    vector_to_parameters(theta.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, momentum=local.momentum)
    orders = orders_of(seed)
    for _ in range(local.epochs):
        order = rows[torch.randperm(len(rows), generator=orders)]
        for part in order.split(local.batch_size):
            if len(part) == 0:
                continue
            optimizer.zero_grad()
            cross_entropy(model(problem._x[part]), problem._y[part]).backward()
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach() - theta


def updates(problem, local, seeds, theta=None, clients=None):
    cohort = problem.cohort(torch.arange(len(COUNTS)) if clients is None else clients)
    start = problem.initial() if theta is None else theta
    return problem.local_updates(cohort, start, local, seeds)


@pytest.mark.parametrize("own", [False, True], ids=["one start", "own starts"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_client_takes_the_steps_of_plain_sgd(name, epochs, momentum, own):
    problem, local = problem_of(name), LocalSGD(epochs, 5, 0.3 * (1 - momentum), momentum)
    theta = problem.initial()
    if own:
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(len(COUNTS), *problem.shape, generator=generator, dtype=theta.dtype)
        theta = theta + 0.1 * noise
    seeds = torch.arange(10, 10 + len(COUNTS))
    found = updates(problem, local, seeds, theta)
    for i, rows in enumerate(problem._parts):
        start, seed = theta[i] if own else theta, int(seeds[i])
        if name == "dropping":
            model = with_given_masks(problem, rows, local, seed)
        else:
            model = copy.deepcopy(problem.model)
        wanted = plain_sgd(problem, model, rows, start, local, seed)
        torch.testing.assert_close(found[i], wanted, **TIGHT)
        assert len(rows) == 0 or found[i].abs().max() > 1e-3
    assert torch.equal(found[1], torch.zeros_like(found[1]))


def test_the_papers_lenet_takes_the_steps_of_torchs_sgd():
    torch.manual_seed(0)
    model, counts = lenet(10).double(), (70, 0, 3)
    x, y = torch.randn(73, 1, 28, 28).double(), torch.randint(10, (73,))
    parts = list(torch.arange(73).split(counts))
    problem = ModelProblem(model, x, y, parts, x, y, local="chained")
    local, seeds = LocalSGD(3, 32, 0.01, 0.9), torch.arange(3)
    found = updates(problem, local, seeds, clients=torch.arange(3))
    for i, rows in enumerate(parts):
        own = copy.deepcopy(problem.model)
        wanted = plain_sgd(problem, own, rows, problem.initial(), local, i)
        torch.testing.assert_close(found[i], wanted, **TIGHT)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", EXACT)
def test_in_float32_the_median_client_is_that_of_the_loop(name, momentum):
    local, seeds = LocalSGD(2, 5, 0.1 * (1 - momentum), momentum), torch.arange(len(COUNTS))
    found, wanted = (
        updates(problem_of(name, dtype=torch.float32, way=way), local, seeds)
        for way in ("chained", "looped")
    )
    moving = wanted.norm(dim=1) > 0
    # The median: what is zero to rounding is on one side of ReLU's kink here, on the other there.
    errors = (found - wanted).norm(dim=1)[moving] / wanted.norm(dim=1)[moving]
    assert errors.median() < 1e-5


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["pooled", "dropping"])
def test_a_client_gets_the_same_bits_among_others_and_alone(name, momentum, threads):
    problem, local = problem_of(name, dtype=torch.float32), LocalSGD(3, 5, 0.3, momentum)
    seeds, before = torch.arange(len(COUNTS)) * 7919 - 3, torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = updates(problem, local, seeds)
        for i in range(len(COUNTS)):
            own = slice(i, i + 1)
            alone = updates(problem, local, seeds[own], clients=torch.tensor([i]))
            assert torch.equal(together[own], alone)
    finally:
        torch.set_num_threads(before)


def test_levels_that_are_drawn_in_parts_are_the_same_levels(monkeypatch):
    problem, local = problem_of("dropping", dtype=torch.float32), LocalSGD(2, 5, 0.1, 0.9)
    seeds = torch.arange(len(COUNTS))
    at_once = updates(problem, local, seeds)
    monkeypatch.setattr("dpkernels.federated.local.chained._MOST_LEVELS", 1)
    assert torch.equal(at_once, updates(problem, local, seeds))


def test_another_seed_draws_other_masks():
    problem = problem_of("dropping")
    cohort = torch.tensor([3])
    one, same, other = (
        updates(problem, LocalSGD(1, 12, 0.3), torch.tensor([seed]), clients=cohort)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_client_that_is_not_finite_leaves_the_others_alone(name, value):
    clean, broken = problem_of(name), problem_of(name)
    broken._x[broken._parts[3]] = value
    local, seeds = LocalSGD(2, 5, 0.1, 0.5), torch.arange(len(COUNTS))
    wanted, found = updates(clean, local, seeds), updates(broken, local, seeds)
    others = torch.tensor([0, 1, 2, 4, 5])
    assert wanted.isfinite().all()
    assert torch.equal(wanted[others], found[others])
    if torch.isnan(torch.tensor(value)):
        assert not found[3].isfinite().all()


def test_the_plan_takes_what_it_can_and_says_why_not():
    local, ten = LocalSGD(1, 64), [500] * 10
    plan = plan_of(lenet5(10), (3, 32, 32), local, ten)
    assert plan.way == "chained" and "compiled" in plan.reason
    assert plan_of(lenet5(10), (3, 32, 32), local, [5]).way == "chained"
    assert plan_of(lenet5(10), (3, 32, 32), local, ten, asked="looped").way == "looped"
    long = LocalSGD(30, 64, 0.01, 0.9)
    assert plan_of(lenet(10), (1, 28, 28), long, ten).way == "chained"
    assert plan_of(cnn5x5(10), (3, 32, 32), long, ten).way == "chained"
    dense = plan_of(strided(), IMAGE, local, ten)
    assert dense.way in ("looped", "vmapped") and "neither ReLU nor a pool" in dense.reason
    assert plan_of(strided(), IMAGE, local, ten, asked="chained").way == "chained"
    half = plan_of(lenet5(10).half(), (3, 32, 32), local, [5])
    assert half.way == "looped" and "no compiled code" in half.reason
    with pytest.raises(ValueError, match=r"chained does not take this model: .*loss"):
        plan_of(lenet5(10), (3, 32, 32), local, ten, asked="chained", cross_entropy=False)


def _frozen():
    model = pooled()
    model[0].weight.requires_grad_(False)
    return model


_TWICE = nn.Conv2d(2, 2, 3, padding=1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)), "groups"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2)), "dilation"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")), "circular"),
        (nn.Sequential(nn.Conv2d(2, 4, 2, padding="same")), "one side"),
        (nn.Sequential(nn.Conv2d(3, 4, 2)), "takes 3 channels"),
        (nn.Sequential(nn.Conv2d(2, 4, 10)), "larger than its image"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), "ceil_mode"),
        (nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "return_indices"),
        (nn.Sequential(nn.Flatten(), nn.MaxPool2d(2)), "flat"),
        (nn.Sequential(nn.Linear(8, 3)), "takes 8 features"),
        (nn.Sequential(nn.Flatten(2), nn.Linear(8, 3)), "Flatten"),
        (nn.Sequential(nn.Flatten(), nn.Linear(144, 3), nn.ReLU()), "end with a Linear"),
        (nn.Sequential(nn.Flatten(), nn.Linear(144, 3), nn.Dropout()), "end with a Linear"),
        (nn.Sequential(nn.BatchNorm2d(2)), "BatchNorm2d"),
        (nn.Sequential(_TWICE, _TWICE), "used twice"),
        (_frozen(), "not trained"),
    ],
)
def test_what_is_no_network_says_why(model, why):
    assert why in network_of(model, IMAGE)


def test_records_that_are_neither_flat_nor_images_are_refused():
    assert "2 dimensions" in network_of(nn.Sequential(nn.Linear(4, 2)), (3, 4))
