"""Kronecker factors where theory says what they are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpkernels.fisher import Diagonal, Kronecker, conv_moments, fisher_information
from dpkernels.fisher.errors import sign_errors
from dpkernels.fisher.estimate import information
from dpkernels.ops import kron
from python_tests.fisher import models
from python_tests.fisher.oracle import assert_same, ggn, squares_by_class


def kronecker(model, x, **options):
    return fisher_information(model, [x], **({"expectation": "exact"} | options))


def assert_blocks_are_exact(fisher, model, x, loss="cross_entropy"):
    for name, one in fisher.layers.items():
        assert isinstance(one, Kronecker)
        assert_same(fisher.dense(name), ggn(model, x, list(one.parameters), loss))


@pytest.mark.parametrize("bias", [True, False])
def test_one_record_of_one_position_has_exact_blocks(bias):
    model, x = models.linear(bias)
    fisher = kronecker(model, x[:1])
    assert fisher.layers.keys() == {"0", "2"} and not fisher.without
    assert_blocks_are_exact(fisher, model, x[:1])


def test_softmax_regression_on_one_record_is_the_whole_matrix():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(1, 4).double()
    fisher = kronecker(model, x)
    p = model(x).softmax(1)[0].detach()
    a = torch.cat([x[0], torch.ones(1).double()])
    (one,) = fisher.layers.values()
    assert_same(one.a, a.outer(a))
    assert_same(one.g, p.diag() - p.outer(p))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("expectation", ["exact", "rademacher"])
def test_deep_linear_networks_with_squared_loss_are_exact_for_any_records(bias, expectation):
    torch.manual_seed(0)
    sizes = (4, 5, 3, 2)
    layers = [nn.Linear(i, o, bias=bias) for i, o in itertools.pairwise(sizes)]
    model, x = nn.Sequential(*layers).double(), torch.randn(7, 4).double()
    if expectation == "exact":
        fisher = kronecker(model, x, loss="squared")
    else:
        # Four sign vectors for two outputs: together the identity.
        def errors(outputs):
            for v in itertools.product((-1.0, 1.0), repeat=2):
                yield torch.tensor(v).double().expand_as(outputs)

        fisher = information(model, [x], errors, "kronecker")
    assert len(fisher.layers) == 3
    assert_blocks_are_exact(fisher, model, x, "squared")


def test_recurrent_products_of_one_step_have_exact_blocks():
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    model, x = Last().double(), torch.randn(1, 1, 3).double()
    fisher = kronecker(model, x)
    assert set(fisher.covered()) == {name for name, _ in model.named_parameters()}
    assert_blocks_are_exact(fisher, model, x)


def test_what_has_no_factors_gets_its_diagonal():
    model, x = models.tokens()
    fisher = kronecker(model, x)
    wanted = squares_by_class(model, x)
    found = {k: one for k, one in fisher.layers.items() if isinstance(one, Diagonal)}
    assert found.keys() == {"embedding.weight", "norm.weight", "norm.bias", "scale"}
    assert set(fisher.covered()) == wanted.keys() and not fisher.without
    for name, one in found.items():
        assert_same(one.values, wanted[name])


GEOMETRIES = [
    {},
    {"stride": (2, 1), "padding": (1, 2)},
    {"dilation": (1, 2), "padding": 1},
    {"stride": 2, "dilation": 2, "padding": (0, 1)},
    {"stride": 3},
]


def of_outputs(model, x, layer):
    """Return what is captured by hand: the layer's input, and errors for each class of a root."""
    kept = {}
    handle = layer.register_forward_hook(lambda _, given, out: kept.update(x=given[0], out=out))
    p = (logits := model(x)).softmax(1).detach()
    handle.remove()
    errors = []
    for k in range(logits.shape[1]):
        d = p.clone()
        d[:, k] -= 1
        weighted = d * p[:, k : k + 1].sqrt()
        errors += torch.autograd.grad(logits, kept["out"], weighted, retain_graph=True)
    return kept["x"].detach(), errors


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("by_rows", [True, False])
def test_factors_of_a_convolution_are_those_of_its_patches(geometry, bias, by_rows, monkeypatch):
    """A: sum over positions, mean over records; G: mean over both."""
    monkeypatch.setattr(conv_moments, "_pays", lambda *_: by_rows)
    model, x = models.images(bias, **geometry)
    fisher = kronecker(model, x)
    for index in (0, 2):
        layer, one = model[index], fisher.layers[str(index)]
        given, errors = of_outputs(model, x, layer)
        patches = functional.unfold(
            given, layer.kernel_size, layer.dilation, layer.padding, layer.stride
        ).mT
        if bias:
            patches = functional.pad(patches, (0, 1), value=1.0)
        rows = [d.flatten(2).mT.flatten(0, 1) for d in errors]
        assert_same(one.a, patches.flatten(0, 1).T @ patches.flatten(0, 1) / len(x))
        assert_same(one.g, sum(d.T @ d for d in rows) / len(rows[0]))
        assert torch.equal(one.a, one.a.T) and torch.equal(one.g, one.g.T)


def test_rows_are_multiplied_where_that_takes_fewer_products(monkeypatch):
    """The papers' networks, and one whose product of rows would be too large."""
    formed = []
    by_rows = conv_moments._by_rows
    monkeypatch.setattr(conv_moments, "_by_rows", lambda *a: formed.append(1) or by_rows(*a))
    geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    for shape, size, expected in (
        ((2, 6, 12, 12), (5, 5), 1),
        ((2, 3, 32, 32), (5, 5), 1),
        ((2, 4, 32, 32), (3, 3), 0),
        ((1, 150, 14, 14), (5, 5), 0),
    ):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        found = conv_moments.patch_moment(x, bias=True, kernel_size=size, **geometry)
        wanted = kron.conv_second_moment(x.double(), size, bias=True)
        plain = functional.unfold(x, size).mT.flatten(0, 1)
        plain = functional.pad(plain, (0, 1), value=1.0)
        allowed = (plain.T @ plain / len(plain) - wanted).abs().max()
        assert (found - wanted).abs().max() <= 2 * allowed + 2.0**-23 * wanted.abs().max()
        assert len(formed) == expected
        formed.clear()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4, 5, 2), (3, 1, 2, 2)])
def test_channels_are_multiplied_wherever_they_are(shape, last):
    d = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if last:
        d = d.movedim(1, -1).contiguous().movedim(-1, 1)
    assert_same(conv_moments.channel_moment(d), kron.second_moment(d, channel_dim=1))


@pytest.mark.parametrize("name", ["positions", "twice"])
def test_factors_of_positions_and_of_calls_add_up(name):
    model, x = models.twice()
    one = kronecker(model, x).layers[name]
    layer, used, outputs = getattr(model, name), [], []

    def keep(_, given, out):
        used.append(given[0].detach().unsqueeze(1).flatten(1, -2))
        outputs.append(out)

    handle = layer.register_forward_hook(keep)
    p = (logits := model(x)).softmax(1).detach()
    handle.remove()
    a = functional.pad(torch.cat(used, 1), (0, 1), value=1.0)
    g = torch.zeros(4, 4).double()
    for k in range(3):
        d = (p - torch.eye(3)[k]) * p[:, k : k + 1].sqrt()
        found = torch.autograd.grad(logits, outputs, d, retain_graph=True)
        rows = torch.cat([e.flatten(0, -2) for e in found])
        g += rows.T @ rows / len(rows)
    assert_same(one.a, torch.einsum("bti,btj->ij", a, a) / len(x))
    assert_same(one.g, g)


def test_a_bias_alone_has_the_number_of_positions_for_a():
    model, x = models.bias_alone()
    fisher = kronecker(model, x)
    first, last = fisher.layers["0"], fisher.layers["4"]
    assert first.weight is None and first.bias == "0.bias"
    assert first.a.tolist() == [[7 * 6]] and last.a.tolist() == [[1]]
    assert_same(fisher.dense("4"), ggn(model, x, ["4.bias"]))


@pytest.mark.parametrize("kind", ["linear", "images"])
def test_all_sign_vectors_together_are_exact(kind):
    model, x = models.MODELS[kind]()

    def errors(outputs):
        log_p = outputs.detach().log_softmax(1)
        for v in itertools.product((-1.0, 1.0), repeat=3):
            yield sign_errors(log_p, torch.tensor(v).to(log_p).expand_as(log_p))

    found, wanted = information(model, [x], errors, "kronecker"), kronecker(model, x)
    for name, one in wanted.layers.items():
        assert_same(found.layers[name].a, one.a)
        assert_same(found.layers[name].g, one.g)


def test_transposed_linear_layers_have_their_factors_swapped():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layer = transformers.pytorch_utils.Conv1D(3, 5)
    model, x = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3)).double(), torch.randn(1, 5).double()
    fisher = kronecker(model, x)
    assert fisher.layers["0"].parameters == ("0.weight",)
    assert fisher.layers["0.bias"].parameters == ("0.bias",)
    assert_blocks_are_exact(fisher, model, x)
