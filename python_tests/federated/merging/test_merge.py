"""Merging does not depend on what it should not, and refuses what does not fit, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpkernels.federated
from dpkernels.federated import ConjugateGradients, merge
from dpkernels.fisher import Diagonal, Fisher, Kronecker
from python_tests.federated.merging.cases import (
    CONVOLUTION,
    LINEAR,
    NORM,
    clients,
    matrix,
    system,
)

METHODS = ("fedfisher", "fedavg", "fisher-merge", "regmean")
TO_THE_END = ConjugateGradients(iterations=500, tolerance=1e-12)


def same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_it_is_exported() -> None:
    assert dpkernels.federated.merge is merge is dpkernels.federated.merging.merge


@given(order=st.permutations(range(4)), seed=st.integers(0, 99), method=st.sampled_from(METHODS))
def test_the_order_of_clients_does_not_matter(order, seed, method) -> None:
    states, fishers = clients(4, seed)
    for state in states:
        state["bn.num_batches_tracked"] = torch.tensor(3)  # of integers it is the first client's
    weights = [1.0, 2.0, 3.0, 0.5]
    found = merge(states, fishers, weights=weights, method=method, solver=TO_THE_END).state
    states, fishers, weights = ([x[i] for i in order] for x in (states, fishers, weights))
    same(merge(states, fishers, weights=weights, method=method, solver=TO_THE_END).state, found)


@given(scale=st.floats(1e-3, 1e6), seed=st.integers(0, 99), method=st.sampled_from(METHODS))
def test_only_proportions_of_weights_matter(scale, seed, method) -> None:
    states, fishers = clients(3, seed)
    found = merge(states, fishers, weights=[1, 2, 3], method=method).state
    scaled = [scale * weight for weight in (1, 2, 3)]
    same(merge(states, fishers, weights=scaled, method=method).state, found)
    equal = merge(states, fishers, method=method).state
    same(merge(states, fishers, weights=[scale] * 3, method=method).state, equal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_one_client_gets_its_model_back(method, dtype) -> None:
    states, fishers = clients(1, dtype=dtype)
    found = merge(states, fishers, weights=[7], method=method).state
    assert found.keys() == states[0].keys()
    assert all(torch.equal(found[name], states[0][name]) for name in found)


@pytest.mark.parametrize("method", METHODS)
def test_equal_models_are_merged_into_themselves(method) -> None:
    # A mean in float64 of equal float32 numbers rounds to them.
    states, fishers = clients(3, dtype=torch.float32)
    found = merge([states[0]] * 3, fishers, weights=[1, 1, 5], method=method).state
    assert all(torch.equal(found[name], states[0][name]) for name in found)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_of_weight_zero_is_left_out(method) -> None:
    states, fishers = clients(3)
    wanted = merge(states[1:], fishers[1:], weights=[1, 2], method=method).state
    states[0]["fc.weight"] = states[0]["fc.weight"] * float("nan")
    fishers[0] = Fisher({}, {}, 0)
    same(merge(states, fishers, weights=[0, 1, 2], method=method).state, wanted)


def test_what_has_no_fisher_is_averaged() -> None:
    states, fishers = clients(3)
    found = merge(states, fishers, weights=[1, 2, 5]).state
    for name in ("free", "bn.running_mean"):
        wanted = (states[0][name] + 2 * states[1][name] + 5 * states[2][name]) / 8
        torch.testing.assert_close(found[name], wanted)
    assert found["bn.num_batches_tracked"] == 10
    everything = merge(states, [Fisher({}, {}, 1)] * 3).state
    same(everything, merge(states, method="fedavg").state)


def test_states_are_not_written_to_nor_shared() -> None:
    states, fishers = clients(2)
    before = [{name: x.clone() for name, x in state.items()} for state in states]
    for method in METHODS:
        for tensor in merge(states, fishers, method=method).state.values():
            tensor.zero_()
    for state, kept in zip(states, before, strict=True):
        same(state, kept)


def test_a_bias_alone_and_names_of_layers() -> None:
    states, fishers = clients(2)
    alone = []
    for number, fisher in enumerate(fishers):
        g = fisher.layers["conv"].g
        layer = Kronecker(None, "conv.bias", torch.full((1, 1), 2.0).double(), g)
        alone.append(Fisher({f"name {number}": layer}, {}, 1))
    found = merge(states, alone, solver=TO_THE_END).state["conv.bias"]
    f, b, _ = system(states, alone, [0.5, 0.5], ("conv.bias",))
    torch.testing.assert_close(found, torch.linalg.solve(f, b))


@pytest.mark.parametrize("damping", [1e-2, 1.0, 30.0])
@pytest.mark.parametrize("preconditioner", [None, "diagonal", "kronecker"])
def test_damping_is_a_multiple_of_the_mean_eigenvalue(damping, preconditioner) -> None:
    states, fishers = clients(2, lost=2)
    solver = ConjugateGradients(500, 1e-12, preconditioner)
    found = merge(states, fishers, weights=[3, 1], solver=solver, damping=damping).state
    for layer in (CONVOLUTION, LINEAR, NORM):
        f, b, start = system(states, fishers, [0.75, 0.25], layer)
        mu = damping * torch.linalg.eigvalsh(f).mean() * torch.eye(len(f), dtype=f.dtype)
        wanted = torch.linalg.solve(f + mu, b + mu @ start)
        torch.testing.assert_close(matrix(found, layer), wanted)


def test_factors_are_made_symmetric() -> None:
    states, fishers = clients(2)
    bent = []
    for fisher in fishers:
        layer = fisher.layers["fc"]
        skew = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        skewed = replace(layer, g=layer.g + skew - skew.mT)
        bent.append(replace(fisher, layers={**fisher.layers, "fc": skewed}))
    same(merge(states, bent).state, merge(states, fishers).state)


def test_half_precision_is_merged_in_float32() -> None:
    states, fishers = clients(2, dtype=torch.float32)
    halves = [{n: x.half() if x.is_floating_point() else x for n, x in s.items()} for s in states]
    wide = [{n: x.float() if x.is_floating_point() else x for n, x in s.items()} for s in halves]
    found, wanted = merge(halves, fishers).state, merge(wide, fishers).state
    assert all(torch.equal(found[name], wanted[name].to(found[name].dtype)) for name in found)


def changed(number: int, **tensors):
    states, fishers = clients(2)
    states[number] = {**states[number], **{k.replace("_", "."): v for k, v in tensors.items()}}
    return states, fishers


def test_states_that_do_not_fit_are_refused() -> None:
    states, fishers = clients(2)
    other = {n: x for n, x in states[1].items() if n != "fc.weight"} | {"more": torch.ones(1)}
    with pytest.raises(ValueError, match=r"lacks 'fc.weight' and has 'more' besides"):
        merge([states[0], other], fishers)
    with pytest.raises(ValueError, match=r"states\[1\]\['fc.weight'\] must be \[4, 5\] float64"):
        merge(*changed(1, fc_weight=torch.ones(5, 4).double()))
    with pytest.raises(ValueError, match=r"states\[1\]\['fc.weight'\] must be .* got .* float32"):
        merge(*changed(1, fc_weight=torch.ones(4, 5)))
    with pytest.raises(ValueError, match=r"states\[1\]\['free'\] must be finite"):
        merge(*changed(1, free=torch.full((2, 3), float("inf")).double()))
    with pytest.raises(ValueError, match=r"states\[0\]\['extra'\] must be a tensor, got str"):
        merge([{"extra": "x"}], method="fedavg")
    with pytest.raises(ValueError, match="at least one"):
        merge([], [])


def test_weights_and_options_that_do_not_fit_are_refused() -> None:
    states, fishers = clients(2)
    for weights in ([1.0], [-1, 2], [0, 0], [1, float("nan")]):
        with pytest.raises(ValueError, match="weights must"):
            merge(states, fishers, weights=weights)
    with pytest.raises(ValueError, match=r"fishers must have one for each of 2 states .*, got 1"):
        merge(states, fishers[:1])
    with pytest.raises(ValueError, match="method='fedavg' without any"):
        merge(states)
    with pytest.raises(ValueError, match="method must be one of"):
        merge(states, fishers, method="mean")
    with pytest.raises(ValueError, match="damping must be a finite number >= 0"):
        merge(states, fishers, damping=-1.0)


def with_layers(fisher: Fisher, **layers) -> Fisher:
    return replace(fisher, layers={**fisher.layers, **layers})


def test_fishers_that_do_not_fit_are_refused() -> None:
    states, (one, two) = clients(2)
    fc = two.layers["fc"]
    diagonal = Diagonal("fc.weight", torch.ones(4, 5).double())
    with pytest.raises(ValueError, match=r"same kind for 'fc.weight', got Kronecker .* Diagonal"):
        merge(states, [one, with_layers(two, fc=diagonal)])
    less = replace(two, layers={n: x for n, x in two.layers.items() if n != "fc"})
    with pytest.raises(ValueError, match=r"'fc.weight', got Kronecker of fc.weight .* no F in"):
        merge(states, [one, less])
    with pytest.raises(ValueError, match=r"a of fc.weight in fishers\[1\] must be \[5, 5\]"):
        merge(states, [one, with_layers(two, fc=replace(fc, a=torch.eye(6).double()))])
    with pytest.raises(ValueError, match=r"g of fc.weight in fishers\[1\] must be finite"):
        merge(states, [one, with_layers(two, fc=replace(fc, g=fc.g / 0))])
    negative = Diagonal("norm.weight", torch.full((6,), -0.5).double())
    with pytest.raises(ValueError, match=r"norm.weight in fishers\[0\] must be >= 0, got -0.5"):
        merge(states, [with_layers(one, norm=negative), two])
    twice = with_layers(one, again=Diagonal("conv.bias", torch.ones(3).double()))
    with pytest.raises(ValueError, match=r"layer 'again' .* must cover parameters of its own"):
        merge(states, [twice, two])
    elsewhere = [with_layers(x, fc=replace(fc, weight="gone")) for x in (one, two)]
    with pytest.raises(ValueError, match="an F of 'gone', but no state has it"):
        merge(states, elsewhere)
    counter = Diagonal("bn.num_batches_tracked", torch.ones(()))
    with pytest.raises(ValueError, match=r"must be of floating point, got torch.int64"):
        merge(states, [with_layers(x, bn=counter) for x in (one, two)])
    ragged = Kronecker("fc.weight", "conv.bias", fc.a, fc.g)
    with pytest.raises(ValueError, match=r"as many rows, got \[4, 3\]"):
        merge(states, [Fisher({"fc": ragged}, {}, 1)] * 2)
