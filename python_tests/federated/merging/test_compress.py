"""An upload costs no more than FedAvg's, comes back, and gives the merged model it should."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from dpkernels.federated.merging.budget import Form, fedavg_bytes, payload_bytes
from dpkernels.federated.merging.compress import compress, decompress
from dpkernels.federated.merging.layout import Layout
from dpkernels.fisher.information import Diagonal, Fisher, Kronecker
from python_tests.federated.merging.uploads import (
    CNN,
    LENET,
    assert_valid,
    factor,
    layout_of,
    made,
    mixed,
    tensors_of,
)

SMALL = {"fc1.weight": (12, 20), "fc2.weight": (6, 12)}


def error(fisher: Fisher, other: Fisher) -> float:
    """Return the relative distance of two Fishers, all tensors together."""
    pairs = list(zip(tensors_of(fisher), tensors_of(other), strict=True))
    moved = sum(float((x.double() - y.double()).square().sum()) for x, y in pairs)
    return (moved / sum(float(x.double().square().sum()) for x, _ in pairs)) ** 0.5


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [None, 100_003, 131_071])
def test_bytes_are_those_sent_and_at_most_the_budget(kind, shared, budget):
    state, fisher = made(LENET, kind)
    layout = Layout.of(state, fisher)

    upload = compress(state, fisher, budget=budget, layout=layout if shared else None)

    assert upload.bytes == len(upload.payload)
    assert upload.bytes == payload_bytes(layout, upload.settings, shared=shared)
    assert upload.bytes <= upload.budget == (budget or 4 * 44190)
    found, _ = decompress(upload.payload, layout=layout if shared else None)
    assert list(found) == list(state)


def test_the_cnns_upload_is_below_fedavgs():
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) for name, shape in CNN.items()}
    layers: dict[str, Kronecker | Diagonal] = {}
    for layer in layout_of(CNN).layers:
        sides = [torch.randn(n, 40, generator=generator) for n in layout_of(CNN).factors(layer)]
        layers[layer.name] = Kronecker(layer.weight, None, *(side @ side.T for side in sides))
    fisher = Fisher(layers, {}, 1)

    upload = compress(state, fisher)

    assert upload.bytes == len(upload.payload) <= 4 * 939616 < upload.bytes * 1.1
    found, came = decompress(upload.payload)
    # 9 bits: half of 1/255 of a row's largest at every entry, about a third of it typical.
    assert error(fisher, came) < 1 / 255
    assert all(torch.equal(matrix, matrix.T) for matrix in tensors_of(came))
    for name, tensor in state.items():
        # 12 bits: half of 1/2047 of the row's largest, and a rounding to float32.
        rows, sent = found[name].flatten(1), tensor.flatten(1)
        bound = sent.abs().amax(1, keepdim=True) * (1 / 4094 + torch.finfo(torch.float32).eps)
        assert bool(((rows - sent).abs() <= bound).all())


@pytest.mark.parametrize("form", ["symmetric", "paper"])
@pytest.mark.parametrize("shared", [True, False])
def test_names_shapes_and_records_come_back(form, shared):
    state, fisher = mixed()
    layout = Layout.of(state, fisher) if shared else None

    payload = compress(state, fisher, budget=20_000, form=form, layout=layout).payload
    found, came = decompress(payload, layout=layout)

    assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in state.items()}
    assert came.records == 17 and came.without == fisher.without
    assert list(came.layers) == list(fisher.layers)
    for sent, got in zip(fisher.layers.values(), came.layers.values(), strict=True):
        assert type(sent) is type(got) and sent.parameters == got.parameters
    for x, y in zip(tensors_of(fisher), tensors_of(came), strict=True):
        assert x.shape == y.shape
    assert_valid(came, semidefinite=form == "symmetric")


def test_a_large_budget_leaves_little_but_float32s_rounding():
    state, fisher = mixed()

    found, came = decompress(compress(state, fisher, budget=100_000).payload)

    # 24 bits for weights and diagonals, 16 for roots: half a step each, twice in a product.
    for name, tensor in state.items():
        assert float((found[name] - tensor).abs().max()) <= 2.0**-23 * float(tensor.abs().max())
    assert error(fisher, came) <= 2.0**-14 * 36**0.5


@pytest.mark.parametrize("kind", ["kronecker", "diagonal"])
def test_a_larger_budget_errs_less(kind):
    state, fisher = made(LENET, kind)
    # All that the server may choose from, in steps that are larger than luck of rounding.
    budgets = [90_000, 110_000, 140_000, 177_000, 250_000]

    errors = [
        error(fisher, decompress(compress(state, fisher, budget=budget).payload)[1])
        for budget in budgets
    ]

    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 5


def test_state_and_fisher_are_left_as_they_were():
    state, fisher = mixed()
    before = [t.clone() for t in (*state.values(), *tensors_of(fisher))]

    compress(state, fisher, budget=20_000)

    for x, y in zip((*state.values(), *tensors_of(fisher)), before, strict=True):
        assert torch.equal(x, y)


def test_a_state_without_fisher_is_sent():
    state, _ = made(SMALL)
    found, came = decompress(compress(state, Fisher({}, {}, 0), budget=2000).payload)
    assert not came.layers
    for name, tensor in state.items():
        assert float((found[name] - tensor).abs().max()) <= float(tensor.abs().max()) / 2**12


def test_the_same_input_gives_the_same_bytes():
    assert compress(*mixed(), budget=20_000).payload == compress(*mixed(), budget=20_000).payload


def test_half_precision_and_double_states_come_back_as_float32():
    state, fisher = made(SMALL)
    for dtype in (torch.bfloat16, torch.float64):
        sent = {name: tensor.to(dtype) for name, tensor in state.items()}
        found, _ = decompress(compress(sent, fisher).payload)
        assert all(tensor.dtype == torch.float32 for tensor in found.values())


def dense_of(fisher: Fisher) -> list[Tensor]:
    """Return G (x) A of every layer, float64, for weights flattened row by row."""
    found = []
    for layer in fisher.layers.values():
        assert isinstance(layer, Kronecker)
        found.append(torch.kron(layer.g.double(), layer.a.double()))
    return found


def merged(uploads: list[tuple[dict[str, Tensor], Fisher]], damping: float) -> list[Tensor]:
    """Return the minimiser of sum_i |w - w_i|^2 in F_i + damping, layer by layer, densely."""
    dense = [dense_of(fisher) for _, fisher in uploads]
    weights = [[t.double().flatten() for t in state.values()] for state, _ in uploads]
    found = []
    for layer in range(len(weights[0])):
        identity = torch.eye(len(weights[0][layer]), dtype=torch.float64) * damping
        total = sum(f[layer] + identity for f in dense)
        right = sum((f[layer] + identity) @ w[layer] for f, w in zip(dense, weights, strict=True))
        assert isinstance(total, Tensor) and isinstance(right, Tensor)
        found.append(torch.linalg.solve(total, right))
    return found


def test_the_merged_model_is_nearer_than_with_the_papers_form():
    shapes = {"fc1.weight": (20, 40), "fc2.weight": (10, 20)}
    clients = []
    for seed in range(3):
        state, fisher = made(shapes, seed=seed)
        generator = torch.Generator().manual_seed(100 + seed)
        layers: dict[str, Kronecker | Diagonal] = {}
        for name, layer in fisher.layers.items():
            assert isinstance(layer, Kronecker)
            # Over several decades, as K-FAC's spectra are.
            a, g = (factor(len(side), generator, 0.7) for side in (layer.a, layer.g))
            layers[name] = dataclasses.replace(layer, a=a, g=g)
        clients.append((state, Fisher(layers, {}, 100)))
    exact = merged(clients, damping=1e-4)

    def moved(form: Form) -> float:
        uploads = [compress(*client, form=form) for client in clients]
        assert all(upload.bytes <= 4 * 1000 for upload in uploads)
        found = merged([decompress(upload.payload) for upload in uploads], damping=1e-4)
        pairs = zip(exact, found, strict=True)
        return sum(float((x - y).square().sum()) for x, y in pairs) ** 0.5

    assert moved("symmetric") < moved("paper") / 3


def test_the_merged_model_of_diagonals_is_nearer_than_with_uniform_codes():
    clients = [made(LENET, "diagonal", seed) for seed in range(3)]

    def minimiser(uploads: list[tuple[dict[str, Tensor], Fisher]]) -> Tensor:
        """Return sum_i f_i w_i / sum_i f_i, or the mean where all f_i are zero."""
        f = torch.stack([torch.cat([x.flatten() for x in tensors_of(u[1])]) for u in uploads])
        w = torch.stack([torch.cat([x.flatten() for x in u[0].values()]) for u in uploads])
        f, w = f.double(), w.double()
        total = f.sum(0)
        return torch.where(total > 0, (f * w).sum(0) / total.clamp(min=1e-300), w.mean(0))

    def moved(form: Form) -> float:
        uploads = [compress(*client, form=form) for client in clients]
        assert form == "paper" or all(upload.bytes <= 4 * 44190 for upload in uploads)
        found = minimiser([decompress(upload.payload) for upload in uploads])
        return float((found - minimiser(clients)).norm())

    assert moved("symmetric") < moved("paper") / 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**127])
@pytest.mark.parametrize("place", ["state", "a", "g", "values"])
def test_values_that_cannot_be_sent_are_refused_at_the_client(value, place):
    state, fisher = mixed()
    layers = dict(fisher.layers)
    conv, norm = layers["conv"], layers["norm.weight"]
    assert isinstance(conv, Kronecker) and isinstance(norm, Diagonal)
    tensor = {
        "state": state["fc.weight"],
        "a": conv.a,
        "g": conv.g,
        "values": norm.values,
    }[place]
    tensor.view(-1)[1] = value

    with pytest.raises(ValueError, match=r"must be finite and below 2\^126, got 1 of .* diverge"):
        compress(state, fisher, budget=20_000)


def test_other_input_is_refused():
    state, fisher = mixed()
    layers = dict(fisher.layers)
    conv = layers["conv"]
    assert isinstance(conv, Kronecker)
    with pytest.raises(ValueError, match="form must be one of symmetric, paper"):
        compress(state, fisher, form="zip")  # type: ignore[arg-type]
    for wrong, words in [
        ({"conv": dataclasses.replace(conv, a=torch.eye(18))}, r"conv's a must be \[19, 19\]"),
        ({"norm": Diagonal("norm.weight", torch.tensor([1.0, -1, 0, 0]))}, "must be >= 0"),
        ({**layers, "again": Diagonal("conv.bias", torch.ones(4))}, "that no other layer covers"),
    ]:
        with pytest.raises(ValueError, match=words):
            compress(state, Fisher(wrong, {}, 1))
    with pytest.raises(ValueError, match="s_q is of form 'paper'"):
        compress(state, fisher, s_q=4)
    with pytest.raises(ValueError, match="s_q: must be 1 to 16"):
        compress(state, fisher, form="paper", s_q=17)
    with pytest.raises(ValueError, match=r"state\['steps'\] must be floating point"):
        compress({**state, "steps": torch.zeros(3, dtype=torch.int64)}, fisher)
    with pytest.raises(ValueError, match="parameters of the state"):
        compress({"conv.weight": state["conv.weight"]}, fisher)
    with pytest.raises(ValueError, match="records"):
        compress(state, dataclasses.replace(fisher, records=-1), budget=20_000)
    with pytest.raises(ValueError, match="layout must be of this state"):
        compress(state, fisher, layout=Layout.of(*made(SMALL)))


def test_noise_below_zero_counts_as_zero():
    state, fisher = made(SMALL)
    layer = fisher.layers["fc1"]
    assert isinstance(layer, Kronecker)
    noisy = dataclasses.replace(layer, g=layer.g - 0.5 * torch.eye(12))
    values, vectors = torch.linalg.eigh(noisy.g.double())
    nearest = (vectors * values.clamp(min=0)) @ vectors.T

    sent = Fisher({**fisher.layers, "fc1": noisy}, {}, 1)
    _, came = decompress(compress(state, sent, budget=100_000).payload)

    found = came.layers["fc1"]
    assert isinstance(found, Kronecker) and bool((values < 0).any())
    assert_valid(came)
    # 16 bits of each entry of the root, and nothing on the diagonal but what they miss.
    assert float((found.g - nearest).norm()) <= 2.0**-14 * 12**0.5 * float(nearest.norm())


def test_fedavgs_bytes_are_the_default():
    state, fisher = made(SMALL)
    assert compress(state, fisher).budget == fedavg_bytes(Layout.of(state, fisher)) == 4 * 312
