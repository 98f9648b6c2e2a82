"""FedAvg, FisherMerge and RegMean by their formulas."""

from __future__ import annotations

import pytest
import torch

from dpkernels.federated import ConjugateGradients, merge
from dpkernels.federated.merging.closed_form import FLOOR, SCALES, regmean
from dpkernels.federated.merging.states import mean
from dpkernels.fisher import Diagonal, Fisher, Kronecker
from python_tests.federated.merging.cases import CONVOLUTION, LINEAR, clients, dense, matrix

P = [0.5, 0.3, 0.2]


def test_fedavg_is_the_weighted_mean() -> None:
    states, _ = clients(3)
    found = merge(states, weights=[50, 30, 20], method="fedavg")
    assert found.iterations == 0 and found.values == ()
    for name in ("conv.weight", "fc.weight", "free"):
        stacked = torch.stack([state[name] for state in states])
        torch.testing.assert_close(
            found.state[name], torch.einsum("n,n...->...", torch.tensor(P).double(), stacked)
        )


def test_fisher_merge_is_the_mean_weighted_by_diagonals() -> None:
    states, fishers = clients(3)
    found = merge(states, fishers, weights=P, method="fisher-merge").state
    for layer in (CONVOLUTION, LINEAR, ("norm.weight",)):
        diagonals = [p * dense(f, layer).diagonal() for p, f in zip(P, fishers, strict=True)]
        moment = sum(d * matrix(s, layer) for d, s in zip(diagonals, states, strict=True))
        torch.testing.assert_close(matrix(found, layer), moment / sum(diagonals))


def test_fisher_merge_is_fedavg_without_information() -> None:
    states, _ = clients(2)
    values = torch.tensor([FLOOR / 2, FLOOR * 2, 0, 1, 1, 1]).double()
    fishers = [Fisher({"n": Diagonal("norm.weight", x)}, {}, 1) for x in (values, values / 2)]
    found = merge(states, fishers, method="fisher-merge").state["norm.weight"]
    one, two = (state["norm.weight"] for state in states)
    mean_of_both, weighted = (one + two) / 2, (2 * one + two) / 3
    # The sums p F are .75 of the values.
    enough = torch.tensor([False, True, False, True, True, True])
    torch.testing.assert_close(found, torch.where(enough, weighted, mean_of_both))


def test_fisher_merge_is_where_fedfisher_ends_on_diagonals() -> None:
    states, fishers = clients(3)
    diagonal = [Fisher({"norm": fisher.layers["norm"]}, {}, 1) for fisher in fishers]
    solver = ConjugateGradients(1, preconditioner="diagonal")
    ended = merge(states, diagonal, weights=P, solver=solver).state
    closed = merge(states, diagonal, weights=P, method="fisher-merge").state
    torch.testing.assert_close(ended, closed)


@pytest.mark.parametrize("scale", [0.0, *SCALES])
def test_regmean_is_a_least_squares_fit_on_the_inputs(scale) -> None:
    states, fishers = clients(3)
    start = mean(states, P)
    found = regmean(states, fishers, P, start, [0, 1, 2], scale=scale)
    for layer, name in ((CONVOLUTION, "conv"), (LINEAR, "fc")):
        grams = []
        for p, fisher in zip(P, fishers, strict=True):
            a = fisher.layers[name].a
            grams.append(p * (scale * a + (1 - scale) * torch.diag(a.diagonal())))
        shape = (-1, len(grams[0]))
        pairs = zip(states, grams, strict=True)
        moment = sum(matrix(state, layer).view(shape) @ gram for state, gram in pairs)
        wanted = moment @ torch.linalg.inv(sum(grams))
        torch.testing.assert_close(matrix(found, layer).view(shape), wanted)
    torch.testing.assert_close(found["norm.weight"], start["norm.weight"])


def test_regmean_of_linear_layers_only_averages_convolutions() -> None:
    states, fishers = clients(3)
    start = mean(states, P)
    only = regmean(states, fishers, P, start, [0, 1, 2], linear_only=True)
    both = regmean(states, fishers, P, start, [0, 1, 2])
    assert torch.equal(only["conv.weight"], start["conv.weight"])
    assert not torch.equal(both["conv.weight"], start["conv.weight"])
    assert torch.equal(only["fc.weight"], both["fc.weight"])


def test_regmean_leaves_inputs_that_are_always_zero_at_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    states, fishers = [], []
    for _ in range(2):
        states.append({"w": torch.randn(3, 5, generator=generator, dtype=torch.float64)})
        x = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        x[:, 1] = 0
        layer = Kronecker("w", None, x.mT @ x, torch.eye(3).double())
        fishers.append(Fisher({"w": layer}, {}, 2))
    found = merge(states, fishers, method="regmean").state["w"]
    average = (states[0]["w"] + states[1]["w"]) / 2
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, 1], average[:, 1])
    assert not torch.allclose(found[:, 0], average[:, 0])


def test_regmean_chooses_between_its_scales() -> None:
    states, fishers = clients(3)
    plain = merge(states, fishers, method="regmean")
    assert plain.chosen == 0 and plain.scores == {}
    models = []

    def later(state):
        models.append(state)
        return len(models)

    found = merge(states, fishers, method="regmean", choose=later)
    assert found.chosen == 1 and found.scores == {0: 1.0, 1: 2.0}
    assert torch.equal(models[0]["fc.weight"], plain.state["fc.weight"])
    wanted = regmean(states, fishers, [1 / 3] * 3, mean(states, [1 / 3] * 3), [0, 1, 2], scale=0.1)
    torch.testing.assert_close(found.state["fc.weight"], wanted["fc.weight"])


def test_regmean_needs_kronecker_factors() -> None:
    states, fishers = clients(2)
    diagonal = [Fisher({"norm": fisher.layers["norm"]}, {}, 1) for fisher in fishers]
    with pytest.raises(ValueError, match="'regmean' needs the factors A of Kronecker Fishers"):
        merge(states, diagonal, method="regmean")
    with pytest.raises(ValueError, match="scale must be in"):
        regmean(states, fishers, [0.5, 0.5], mean(states, [0.5, 0.5]), [0, 1], scale=1.0)
