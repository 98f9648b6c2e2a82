"""Diagonal Fisher information against loops of autograd over records and classes."""

from __future__ import annotations

import itertools

import pytest
import torch

from dpkernels.fisher import Diagonal, conv_squares, fisher_information
from dpkernels.fisher.errors import sign_errors
from dpkernels.fisher.estimate import information
from python_tests.fisher import models
from python_tests.fisher.oracle import assert_same, ggn, squares_by_class


def diagonal(model, x, **options):
    arguments = {"kind": "diagonal", "expectation": "exact"} | options
    return fisher_information(model, [x], **arguments)


def values_of(fisher):
    assert all(isinstance(one, Diagonal) for one in fisher.layers.values())
    assert all(name == one.parameter for name, one in fisher.layers.items())
    return {name: one.values for name, one in fisher.layers.items()}


@pytest.mark.parametrize("blocks", ["large", "small"])
@pytest.mark.parametrize("kind", models.MODELS)
def test_exact_is_the_loop_over_records_and_classes(kind, blocks, monkeypatch):
    if blocks == "small":
        monkeypatch.setattr(conv_squares, "_BLOCK_BYTES", 1)
    model, x = models.MODELS[kind]()
    fisher = diagonal(model, x)
    wanted = squares_by_class(model, x)
    found = values_of(fisher)
    assert found.keys() == wanted.keys() and not fisher.without and fisher.records == len(x)
    for name, values in wanted.items():
        assert_same(found[name], values)


@pytest.mark.parametrize("kind", ["linear", "images", "twice"])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_exact_is_the_diagonal_of_the_gauss_newton_matrix(kind, loss):
    model, x = models.MODELS[kind]()
    found = values_of(diagonal(model, x, loss=loss))
    wanted = ggn(model, x, list(found), loss).diagonal()
    assert_same(torch.cat([v.flatten() for v in found.values()]), wanted)


def test_squared_loss_of_one_linear_layer_is_the_mean_of_squared_features():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 2).double(), torch.randn(9, 4).double()
    found = values_of(diagonal(model, x, loss="squared"))
    assert_same(found["weight"], x.square().mean(0).expand(2, 4))
    assert_same(found["bias"], torch.ones(2).double())


@pytest.mark.parametrize("kind", ["linear", "images", "tokens"])
def test_all_sign_vectors_together_are_exact(kind):
    model, x = models.MODELS[kind]()

    def errors(outputs):
        log_p = outputs.detach().log_softmax(1)
        for v in itertools.product((-1.0, 1.0), repeat=outputs.shape[1]):
            yield sign_errors(log_p, torch.tensor(v).to(log_p).expand_as(log_p))

    found = values_of(information(model, [x], errors, "diagonal"))
    for name, values in values_of(diagonal(model, x)).items():
        assert_same(found[name], values)


@pytest.mark.parametrize("expectation", ["sampled", "rademacher"])
@pytest.mark.parametrize("draws", [200, 20_000])
def test_draws_approach_exact_by_the_root_of_their_number(expectation, draws):
    model, x = models.linear()
    one = x[:1]
    exact = values_of(diagonal(model, one))
    copies = one.expand(draws, -1)
    found = values_of(diagonal(model, copies, expectation=expectation))
    p = model(one).softmax(1)[0].detach()
    vectors = [p - torch.eye(3)[k] for k in range(3)]
    chances = p
    if expectation == "rademacher":
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3))).double()
        vectors = list(sign_errors(p.log().expand(8, 3), signs))
        chances = torch.full((8,), 1 / 8).double()
    # The variance of one draw of a squared gradient, over all that can be drawn.
    fourths = {name: torch.zeros_like(v) for name, v in exact.items()}
    named = dict(model.named_parameters())
    for d, chance in zip(vectors, chances, strict=True):
        loss = (model(one)[0] * d).sum()
        for name, g in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            fourths[name] += chance * g**4
    variance = sum(float((fourths[k] - exact[k].square()).sum()) for k in exact) / draws
    error = sum(float((found[k] - exact[k]).square().sum()) for k in exact)
    # Markov: the squared error has this mean, and is 100 times as large for one seed in 100.
    assert error <= 100 * variance


def test_float32_is_as_good_as_autograd_in_float32():
    model, x = models.images()
    truth = squares_by_class(model, x)
    single = squares_by_class(model.float(), x.float())
    found = values_of(diagonal(model, x.float()))
    for name, values in truth.items():
        assert found[name].dtype == torch.float32
        error, allowed = ((f[name] - values).abs().max() for f in (found, single))
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps * values.abs().max()
