"""OTFusion finds permutations, keeps what agrees, and says what it cannot take."""

from __future__ import annotations

import copy
import itertools
import sys

import pytest
import torch
from torch import nn

from dpkernels.federated.merging.ot_fusion import ot_fusion
from python_tests.federated.merging.networks_of_units import (
    CASES,
    built,
    convolutions,
    layers,
    mlp,
    permuted,
    records,
)
from python_tests.optional_packages import optional_package

optional_package("ot")

# Rounding of a few float64 sums of numbers near 1.
ROUNDING = {"rtol": 1e-12, "atol": 1e-13}


def outputs(model, state, x):
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cost", ["weights", "directions"])
def test_a_permuted_copy_is_recognised(name, cost):
    make, shape = CASES[name]
    model = built(make, 0)
    copies = [model, permuted(model, 1), permuted(model, 2)]
    states = [m.state_dict() for m in copies]
    x = records(shape)
    assert not torch.equal(states[0][next(iter(states[0]))], states[1][next(iter(states[1]))])
    fused = ot_fusion(model, states, weights=[1, 2, 5], cost=cost)
    torch.testing.assert_close(outputs(model, fused, x), model(x).detach(), **ROUNDING)
    for key, wanted in states[0].items():
        torch.testing.assert_close(fused[key], wanted, **ROUNDING)


def test_the_plain_average_of_a_permuted_copy_is_another_function():
    make, shape = CASES["convolutions"]
    model = built(make, 0)
    other, x = permuted(model, 1).state_dict(), records(shape)
    average = {key: (value + other[key]) / 2 for key, value in model.state_dict().items()}
    assert (outputs(model, average, x) - model(x)).abs().max() > 0.01


def test_the_reference_gives_the_order_of_units():
    model = built(convolutions, 0)
    states = [model.state_dict(), permuted(model, 1).state_dict()]
    for reference in (0, 1):
        fused = ot_fusion(model, states, reference=reference)
        for key, wanted in states[reference].items():
            torch.testing.assert_close(fused[key], wanted, **ROUNDING)


def test_identical_models_return_themselves_in_their_own_dtype():
    model = built(convolutions, 0).float()
    state = model.state_dict()
    fused = ot_fusion(model, [state, state, state])
    assert list(fused) == list(state)
    for key, wanted in state.items():
        assert fused[key].dtype == torch.float32 and torch.equal(fused[key], wanted)


def test_the_cheapest_of_all_permutations_is_taken():
    """One hidden layer: against every assignment, its cost written out unit by unit."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    first, second = (built(lambda: copy.deepcopy(model), 0) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in second.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    @torch.no_grad()
    def cost(order):
        return sum(
            float((second[0].weight[u] - first[0].weight[r]).square().sum())
            + float((second[0].bias[u] - first[0].bias[r]) ** 2)
            for r, u in enumerate(order)
        )

    best = list(min(itertools.permutations(range(4)), key=cost))
    fused = ot_fusion(model, [first.state_dict(), second.state_dict()], weights=[3, 1])
    wanted = {
        "0.weight": 0.75 * first[0].weight + 0.25 * second[0].weight[best],
        "0.bias": 0.75 * first[0].bias + 0.25 * second[0].bias[best],
        "2.weight": 0.75 * first[2].weight + 0.25 * second[2].weight[:, best],
        "2.bias": 0.75 * first[2].bias + 0.25 * second[2].bias,
    }
    for key, value in wanted.items():
        torch.testing.assert_close(fused[key], value.detach(), **ROUNDING)


def test_a_scaled_unit_is_recognised_by_its_direction():
    model = built(lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)), 0)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for m, scale in ((first, 1.0), (second, 10.0)):
            m[0].bias.zero_()
            m[0].weight.copy_(torch.tensor([[1.0, 0, 0], [0, 9.0, 0]]))
            m[0].weight[0] *= scale  # of the second client, unit 0 is as long as unit 1
            m[2].weight[:, 0] /= scale
    second = permuted(second, 0)
    states = [first.state_dict(), second.state_dict()]
    fused = ot_fusion(model, states, cost="directions")
    assert fused["0.weight"][0, 0] == 5.5 and fused["0.weight"][0, 1] == 0
    assert fused["0.weight"][1, 1] == 9 and fused["0.weight"][1, 0] == 0


def test_units_that_the_reference_has_several_times_are_split():
    """Every unit twice, at half its outgoing weight, is the same function."""
    narrow, wide = built(mlp, 0), built(lambda: mlp(12), 0)
    with torch.no_grad():
        for small, large in zip(layers(narrow), layers(wide), strict=True):
            large.bias.copy_(small.bias.repeat(2) if len(large.bias) == 12 else small.bias)
        layers(wide)[0].weight.copy_(layers(narrow)[0].weight.repeat(2, 1))
        layers(wide)[1].weight.copy_(layers(narrow)[1].weight.repeat(1, 2) / 2)
        layers(wide)[2].weight.copy_(layers(narrow)[2].weight)
    states = [wide.state_dict(), narrow.state_dict()]
    for reference, model in enumerate((wide, narrow)):
        fused = ot_fusion(model, states, reference=reference)
        for key, wanted in states[reference].items():
            torch.testing.assert_close(fused[key], wanted, **ROUNDING)


def test_without_hidden_units_it_is_the_weighted_average():
    model = built(lambda: nn.Sequential(nn.Linear(4, 3)), 0)
    states = [built(lambda: nn.Sequential(nn.Linear(4, 3)), s).state_dict() for s in (1, 2)]
    fused = ot_fusion(model, states, weights=[1, 3])
    for key in states[0]:
        wanted = 0.25 * states[0][key] + 0.75 * states[1][key]
        torch.testing.assert_close(fused[key], wanted, **ROUNDING)


def test_inputs_are_left_as_they_were():
    model = built(convolutions, 0)
    states = [built(convolutions, s).state_dict() for s in (1, 2)]
    kept = copy.deepcopy(states)
    before = copy.deepcopy(model.state_dict())
    ot_fusion(model, states)
    for state, wanted in zip([*states, model.state_dict()], [*kept, before], strict=True):
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 4), Residual(), nn.Linear(4, 2)), "Residual is no layer"),
        (nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)), "BatchNorm2d is no layer"),
        (nn.Sequential(nn.Conv2d(2, 4, 1, groups=2)), "2 groups"),
        (nn.Sequential(nn.Conv2d(2, 4, 1), nn.Linear(3, 2)), "not flattened"),
        (nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 2, 1)), "after what is flat"),
        (nn.Sequential(nn.Conv2d(2, 4, 1)), "end with a Linear"),
        (nn.Sequential(nn.Conv2d(2, 4, 1), nn.Flatten(2), nn.Linear(3, 2)), "more than one axis"),
        (nn.Sequential(*[nn.Linear(4, 4)] * 2), "used twice"),
    ],
)
def test_other_models_are_refused_with_what_is_in_the_way(model, reason):
    with pytest.raises(ValueError, match=reason):
        ot_fusion(model, [model.state_dict()])


def test_what_does_not_fit_is_refused():
    model = built(mlp, 0)
    state = model.state_dict()
    short = {key: value for key, value in state.items() if key != "1.bias"}
    with pytest.raises(ValueError, match=r"states\[1\].*1\.bias"):
        ot_fusion(model, [state, short])
    with pytest.raises(ValueError, match=r"states\[1\]\['3.weight'\] must take 6 units"):
        ot_fusion(model, [state, state | {"3.weight": torch.zeros(5, 7)}])
    with pytest.raises(ValueError, match=r"states\[1\] must have the model's 3 outputs"):
        ot_fusion(model, [state, state | {"6.weight": torch.zeros(4, 5)}])
    with pytest.raises(ValueError, match=r"states\[0\].*not finite"):
        ot_fusion(model, [state | {"6.bias": torch.full((3,), torch.nan)}])
    with pytest.raises(ValueError, match="weights must have one for each of 1"):
        ot_fusion(model, [state], weights=[1, 2])
    with pytest.raises(ValueError, match="not all zero"):
        ot_fusion(model, [state], weights=[0])
    with pytest.raises(ValueError, match="at least one client"):
        ot_fusion(model, [])
    with pytest.raises(ValueError, match="reference"):
        ot_fusion(model, [state], reference=1)
    with pytest.raises(ValueError, match="cost must be"):
        ot_fusion(model, [state], cost="activations")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    model = built(mlp, 0)
    with pytest.raises(ImportError, match=r"dpkernels\[fusion\]"):
        ot_fusion(model, [model.state_dict()])
