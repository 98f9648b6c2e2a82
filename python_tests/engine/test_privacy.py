"""No sample moves the sum further than is stated: every layer, clipping mode, preconditioner."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpkernels import clipping
from dpkernels.ops.factor import Diagonal, Full, LowRank
from dpkernels.precondition import FixedSides, Sides
from python_tests.engine.models import CASES, made
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    median_norm,
    preconditioned,
    private,
    private_sum,
    sample_gradients,
    square,
)
from python_tests.hypothesis_profiles import examples

MODES = {
    "flat": lambda: clipping.Flat(0.3),
    "per layer": lambda: clipping.PerLayer(0.3),
    "automatic": lambda: clipping.Automatic(0.3),
    "adaptive": lambda: clipping.Adaptive(0.3),
}


def spd(size):
    basis, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    matrix = (basis * (0.1 + 10 * torch.rand(size, dtype=torch.float64))) @ basis.T
    return Full((matrix + matrix.T) / 2)


def low_rank(size):
    rank = max(1, size // 2)
    basis, _ = torch.linalg.qr(torch.randn(size, rank, dtype=torch.float64))
    return LowRank(basis, 0.1 + torch.rand(rank, dtype=torch.float64), 3.0)


def diagonal(size):
    return Diagonal(0.1 + 5 * torch.rand(size, dtype=torch.float64))


FACTORS = {"full": spd, "low rank": low_rank, "diagonal": diagonal}
SIDES = {
    "both": lambda make, o, i, bias: Sides(make(o), make(i)),
    "both, with the bias as a column": lambda make, o, i, bias: Sides(make(o), make(i + bias)),
    "left": lambda make, o, i, bias: Sides(left=make(o)),
    "right": lambda make, o, i, bias: Sides(right=make(i)),
}


def sides_of(model, make, which="both"):
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (
            isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        ):
            rows = module.weight.flatten(1)
            bias = int(module.bias is not None)
            found[name] = SIDES[which](make, rows.shape[0], rows.shape[1], bias)
    return found


def distance(some, others):
    squares = [(some[name] - others[name]).double().square().sum() for name in some]
    return float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("preconditioner", ["none", "full"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
@examples(2)
@given(
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    removed=st.integers(0, 4),
    reduction=st.sampled_from(["sum", "mean"]),
)
def test_one_sample_moves_the_sum_by_at_most_the_sensitivity(
    name, mode, preconditioner, scale, removed, reduction
):
    model, (x,) = made(name, samples=5)
    if x.is_floating_point():
        x = x * scale
    if preconditioner == "full" and "tied" in name:
        sides = {}
    else:
        sides = sides_of(model, spd) if preconditioner == "full" else {}
    others = torch.cat([x[:removed], x[removed + 1 :]])
    sums = [
        private_sum(
            model, (data,), MODES[mode](), reduction=reduction, preconditioner=FixedSides(sides)
        )
        for data in (x, others)
    ]
    layers = private(model, MODES[mode]())[0]
    assert distance(*sums) <= layers.sensitivity * (1 + 1e-6)
    assert layers.sensitivity <= 0.3 * (1 + 1e-12)


def test_every_sample_reaches_the_bound_that_is_stated():
    """The sensitivity is not stated larger than it is, or noise would be wasted."""
    model, (x,) = made("linear 3-D", samples=1)
    for mode in ("flat", "adaptive"):
        total = private_sum(model, (100 * x,), MODES[mode]())
        assert math.isclose(math.hypot(*(float(g.norm()) for g in total.values())), 0.3)
    per_layer = private_sum(model, (100 * x,), clipping.PerLayer({"0": 0.3, "2": 0.4}))
    assert math.isclose(math.hypot(*(float(g.norm()) for g in per_layer.values())), 0.5)


@pytest.mark.parametrize("which", SIDES)
@pytest.mark.parametrize("form", FACTORS)
@pytest.mark.parametrize("name", ["linear", "linear 3-D", "conv2d", "layer norm", "repeated"])
def test_preconditioned_sums_are_those_of_single_samples(name, form, which):
    model, inputs = made(name)
    sides = sides_of(model, FACTORS[form], which)
    gradients = [preconditioned(g, sides, model) for g in sample_gradients(model, inputs)]
    bound = median_norm(gradients)
    got = private_sum(model, inputs, bound, preconditioner=FixedSides(sides))
    assert_same(got, clipped_sum(gradients, bound))


def test_a_preconditioner_must_fit_and_name_layers_that_exist():
    model, _ = made("linear")
    with pytest.raises(ValueError, match=r"0 \(Linear\): left must be of size 7, got 5"):
        private(model, 1.0, preconditioner=FixedSides({"0": Sides(left=spd(5))}))
    with pytest.raises(ValueError, match=r"factors for \['head'\]"):
        private(model, 1.0, preconditioner=FixedSides({"head": Sides(left=spd(5))}))
    grouped, _ = made("conv2d grouped")
    with pytest.raises(ValueError, match="mix groups"):
        private(grouped, 1.0, preconditioner=FixedSides({"0": Sides(left=spd(6))}))
    normal, _ = made("layer norm")
    with pytest.raises(ValueError, match="Diagonal of size 6"):
        private(normal, 1.0, preconditioner=FixedSides({"1": Sides(left=spd(6))}))


def test_factors_stay_the_same_within_a_logical_step():
    model, inputs = made("linear")

    class Restless:
        calls = 0

        def sides(self, layer):
            self.calls += 1
            size = 7 if layer == "0" else 3
            return Sides(left=Diagonal(torch.full((size,), float(self.calls), dtype=torch.float64)))

    restless = Restless()
    training, optimizer = private(model, 1e9, preconditioner=restless)
    after_checks = restless.calls
    for part in inputs[0].split(3):
        square(model(part)).sum().backward()
    assert restless.calls == after_checks + 2
    optimizer.step()
    square(model(*inputs)).sum().backward()
    assert restless.calls == after_checks + 4
    assert training.report().unpreconditioned == ()


class Silent(FixedSides):
    """Has nothing to say about its data."""


class Outspoken(FixedSides):
    not_private = "it looks at the data"


class Broken(FixedSides):
    @property
    def not_private(self):
        return self.probe.not_private


class Stands(FixedSides):
    """Stands in for another one, which it has lost."""

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "other"), name)


@pytest.mark.parametrize(
    ("kind", "void"),
    [
        (Silent, None),
        (Outspoken, "it looks at the data"),
        (Broken, "not_private of Broken cannot be read: .*'probe'"),
        (Stands, "not_private of Stands cannot be read: .*'other'"),
    ],
)
def test_a_preconditioner_that_cannot_say_whether_it_is_private_is_not(kind, void):
    model, _ = made("linear")
    found = private(model, 1.0, preconditioner=kind({}))[0].void
    assert found is None if void is None else re.match(void, found)


def test_a_layer_that_only_a_later_microbatch_reaches_has_the_factors_of_the_others():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x, which):
            return (self.first if which else self.second)(x)

    class Moved:
        by = 1.0

        def sides(self, layer):
            return Sides(left=Diagonal(torch.full((2,), self.by)))

    model, moved = Branches(), Moved()
    x = torch.ones(1, 3)
    _, optimizer = private(model, 1e9, preconditioner=moved)
    model(x, True).sum().backward()
    moved.by = 100.0
    model(x, False).sum().backward()
    optimizer.step()
    assert torch.equal(model.second.weight.grad, torch.ones(2, 3))


def test_adaptive_clipping_follows_the_quantile():
    model, inputs = made("linear")
    norms = torch.tensor(
        [
            float(torch.stack([g.square().sum() for g in one.values()]).sum().sqrt())
            for one in sample_gradients(model, inputs)
        ]
    )
    adaptive = clipping.Adaptive(100.0, quantile=0.5, rate=0.5, count_std=1e-6)
    training, optimizer = private(model, adaptive, expected_batch_size=7)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(60):
        square(model(*inputs)).sum().backward()
        optimizer.step()
    assert norms.min() < adaptive.max_norm < norms.max()
    assert training.sensitivity == adaptive.max_norm
    assert training.extra_query == clipping.NoisyCount(sensitivity=0.5, std=1e-6)


def test_adaptive_clipping_counts_a_discarded_step_for_nothing():
    model, inputs = made("linear")
    adaptive = clipping.Adaptive(1e-3, count_std=1e-9)
    _, optimizer = private(model, adaptive, expected_batch_size=7)
    square(model(*inputs)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    # No sample counts as one half, the quantile: the bound stays where it is.
    assert math.isclose(adaptive.max_norm, 1e-3, rel_tol=1e-6)


def test_per_layer_bounds_must_name_every_layer():
    model, _ = made("linear")
    with pytest.raises(ValueError, match=r"without a bound: \['2'\]"):
        private(model, clipping.PerLayer({"0": 1.0}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: clipping.Flat(-1.0),
        lambda: clipping.Automatic(1.0, gamma=-1.0),
        lambda: clipping.PerLayer({"a": 0.0}),
        lambda: clipping.Adaptive(1.0, quantile=1.0),
        lambda: clipping.Adaptive(1.0, count_std=0.0),
    ],
)
def test_bad_bounds_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()
