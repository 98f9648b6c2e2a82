"""Products with F, its copies, and its state."""

from __future__ import annotations

import io

import pytest
import torch

from dpkernels.fisher import Diagonal, Fisher, Kronecker, fisher_information
from python_tests.fisher import models
from python_tests.fisher.oracle import assert_same


def change_of(model):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
@pytest.mark.parametrize("model", ["linear", "images", "tokens", "biases alone"])
def test_products_are_those_of_the_dense_blocks(kind, model):
    net, x = models.MODELS[model]()
    fisher = fisher_information(net, [x], kind=kind)
    change = change_of(net)
    found, total = fisher.matvec(change), 0.0
    assert list(found) == list(fisher.covered())
    for name, one in fisher.layers.items():
        flat = torch.cat([change[p].flatten() for p in one.parameters])
        wanted = fisher.dense(name) @ flat
        assert_same(torch.cat([found[p].flatten() for p in one.parameters]), wanted)
        assert all(found[p].shape == change[p].shape for p in one.parameters)
        total += float(flat @ wanted)
    assert abs(fisher.quadratic(change) - total) <= 1e-12 * total


def test_a_quadratic_form_is_positive_and_twice_the_kl_of_a_small_change():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 3).double(), torch.randn(1, 4).double()
    fisher = fisher_information(model, [x], expectation="exact")
    change, step = change_of(model), 1e-4
    before = model(x).detach().log_softmax(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += step * change[name]
    after = model(x).detach().log_softmax(1)
    kl = float((before.exp() * (before - after)).sum())
    wanted = 2 * kl / step**2
    assert wanted > 0
    # The next term of the series is smaller by the step; the change of a logit is below 10.
    assert abs(fisher.quadratic(change) - wanted) <= 10 * step * wanted


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_scaling_scales_products(kind):
    model, x = models.images()
    fisher = fisher_information(model, [x], kind=kind)
    change = change_of(model)
    half = fisher.scaled(0.5)
    assert half.records == fisher.records and half.without == fisher.without
    wanted = fisher.matvec(change)
    for name, product in half.matvec(change).items():
        assert_same(product, wanted[name] / 2)
    for c in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and >= 0"):
            fisher.scaled(c)


def test_to_moves_all_tensors():
    model, x = models.tokens()
    single = fisher_information(model, [x]).to(torch.float32)
    for one in single.layers.values():
        assert all(v.dtype == torch.float32 for v in vars(one).values() if torch.is_tensor(v))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_a_state_goes_through_a_file(kind):
    torch.manual_seed(0)
    model = models.Tied()
    fisher = fisher_information(model, [torch.randint(5, (4, 3))], kind=kind)
    file = io.BytesIO()
    torch.save(fisher.state_dict(), file)
    file.seek(0)
    found = Fisher.from_state_dict(torch.load(file, weights_only=True))
    assert found.records == 4 and found.without == fisher.without
    for name, one in fisher.layers.items():
        again = found.layers[name]
        assert type(again) is type(one)
        for key, value in vars(one).items():
            other = getattr(again, key)
            assert torch.equal(other, value) if torch.is_tensor(value) else other == value


def test_a_strange_state_is_refused():
    with pytest.raises(ValueError, match="state lacks layers, without"):
        Fisher.from_state_dict({"records": 3})
    state = {"layers": {"fc": {"a": torch.eye(2)}}, "without": {}, "records": 1}
    with pytest.raises(ValueError, match="fc must have weight, bias, a, g, got a"):
        Fisher.from_state_dict(state)


def test_parameters_that_are_missing_or_of_another_shape_are_named():
    fisher = Fisher(
        {
            "fc": Kronecker("fc.weight", "fc.bias", torch.eye(3), torch.eye(2)),
            "scale": Diagonal("scale", torch.ones(4)),
        },
        {},
        1,
    )
    x = {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2), "scale": torch.ones(4)}
    assert fisher.quadratic(x) == 10
    with pytest.raises(KeyError, match=r"x lacks fc\.bias"):
        fisher.matvec({"fc.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"fc\.weight and fc\.bias must make a matrix \[2, 3\]"):
        fisher.matvec(x | {"fc.weight": torch.ones(2, 3)})
    with pytest.raises(ValueError, match=r"scale must be \[4\], got \[2\]"):
        fisher.matvec(x | {"scale": torch.ones(2)})
