"""From three sums comes what comes from all models and diagonal Fishers."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkernels.federated import Adam, ConjugateGradients, GradientDescent, merge
from dpkernels.federated.merging import add_sums, client_sums, merge_sums
from dpkernels.fisher import Diagonal, Fisher
from python_tests.federated.merging.cases import clients

WEIGHTS = [0.5, 0.3, 0.2]


def diagonal_clients(count: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    states, _ = clients(count, seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    fishers = []
    for _ in states:
        layers = {}
        for name in ("conv.weight", "fc.weight", "norm.weight"):
            shape = states[0][name].shape
            values = torch.rand(shape, generator=generator, dtype=torch.float64)
            layers[name] = Diagonal(name, values.to(dtype))
        fishers.append(Fisher(layers, {}, 1))
    return states, fishers


def summed(states, fishers, weights):
    triples = zip(states, fishers, weights, strict=True)
    return add_sums(client_sums(*triple) for triple in triples)


@given(
    seed=st.integers(0, 99),
    solver=st.sampled_from(
        [
            ConjugateGradients(),
            ConjugateGradients(preconditioner="diagonal"),
            GradientDescent(20),
            Adam(20),
        ]
    ),
    damping=st.sampled_from([0.0, 0.3]),
)
def test_it_is_merge(seed, solver, damping) -> None:
    states, fishers = diagonal_clients(3, seed)
    found = merge_sums(
        summed(states, fishers, WEIGHTS), solver=solver, damping=damping, public=states[0]
    )
    wanted = merge(states, fishers, weights=WEIGHTS, solver=solver, damping=damping)
    assert found.state.keys() == wanted.state.keys()
    for name, tensor in wanted.state.items():
        torch.testing.assert_close(found.state[name], tensor)
    fallen = [value - wanted.values[0] for value in wanted.values]
    shared = min(len(fallen), len(found.values))
    allowed = 1e-12 * wanted.values[0]
    pairs = zip(found.values[:shared], fallen[:shared], strict=True)
    assert max(abs(x - y) for x, y in pairs) <= allowed


def test_in_float32_too_to_its_rounding() -> None:
    states, fishers = diagonal_clients(3, dtype=torch.float32)
    solver = ConjugateGradients(1, preconditioner="diagonal")
    found = merge_sums(summed(states, fishers, WEIGHTS), solver=solver, public=states[0]).state
    wanted = merge(states, fishers, weights=WEIGHTS, solver=solver).state
    for name in fishers[0].layers:
        f = sum(p * x.layers[name].values for p, x in zip(WEIGHTS, fishers, strict=True))
        size = sum(
            p * x.layers[name].values * s[name].abs()
            for p, x, s in zip(WEIGHTS, fishers, states, strict=True)
        )
        # A dozen roundings of the terms of sum p F W / sum p F, and of the start.
        largest = torch.stack([state[name].abs() for state in states]).amax(0)
        allowed = 12 * torch.finfo(torch.float32).eps * (size / f + largest)
        assert ((found[name] - wanted[name]).abs() <= allowed).all()
        assert found[name].dtype == torch.float32


def test_numbers_of_records_do_for_weights() -> None:
    states, fishers = diagonal_clients(3)
    by_share = merge_sums(summed(states, fishers, WEIGHTS), damping=0.1)
    records = [50 * weight for weight in WEIGHTS]
    by_records = merge_sums(summed(states, fishers, records), weight=50, damping=0.1)
    torch.testing.assert_close(by_records.state, by_share.state)


def test_a_client_sends_three_vectors_and_nothing_else() -> None:
    states, fishers = diagonal_clients(1)
    sent = client_sums(states[0], fishers[0], 0.25)
    assert [x.name for x in fields(sent)] == ["fisher", "moment", "state", "dtypes"]
    for name, layer in fishers[0].layers.items():
        torch.testing.assert_close(sent.fisher[name], 0.25 * layer.values)
        torch.testing.assert_close(sent.moment[name], 0.25 * layer.values * states[0][name])
    assert "bn.num_batches_tracked" not in sent.state
    for name, tensor in sent.state.items():
        torch.testing.assert_close(tensor, 0.25 * states[0][name])


def test_integers_come_from_the_public_model() -> None:
    states, fishers = diagonal_clients(2)
    total = summed(states, fishers, [0.5, 0.5])
    assert "bn.num_batches_tracked" not in merge_sums(total).state
    public = {"bn.num_batches_tracked": torch.tensor(3)}
    assert merge_sums(total, public=public).state["bn.num_batches_tracked"] == 3


def test_what_cannot_be_summed_is_refused() -> None:
    states, fishers = clients(2)
    with pytest.raises(ValueError, match=r"need diagonal Fishers, got K-FAC of conv.weight and"):
        client_sums(states[0], fishers[0], 0.5)
    states, fishers = diagonal_clients(2)
    with pytest.raises(ValueError, match="weight must be a finite number >= 0"):
        client_sums(states[0], fishers[0], -1.0)
    with pytest.raises(ValueError, match=r"\['free'\] must be finite"):
        client_sums({**states[0], "free": torch.tensor(float("nan"))}, fishers[0], 0.5)
    one = client_sums(states[0], fishers[0], 0.5)
    less = Fisher({"norm.weight": fishers[1].layers["norm.weight"]}, {}, 1)
    with pytest.raises(ValueError, match="upload 1 must have the parameters and shapes of the"):
        add_sums([one, client_sums(states[1], less, 0.5)])
    with pytest.raises(ValueError, match="at least one"):
        add_sums([])
    with pytest.raises(ValueError, match="weight must be a finite number > 0"):
        merge_sums(one, weight=0.0)
