"""The solvers' iterates: against other implementations, by their values, and which is chosen."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dpkernels.federated import Adam, ConjugateGradients, GradientDescent, merge
from dpkernels.fisher import Diagonal, Fisher, Kronecker
from python_tests.federated.merging.cases import (
    CONVOLUTION,
    LINEAR,
    NORM,
    clients,
    matrix,
    objective,
    system,
)

P = [0.5, 0.3, 0.2]
LAYERS = (CONVOLUTION, LINEAR, NORM)
SOLVERS = [
    ConjugateGradients(12),
    ConjugateGradients(12, preconditioner="kronecker"),
    ConjugateGradients(12, preconditioner="diagonal"),
    GradientDescent(12),
    Adam(12),
    Adam(12, form="published"),
]


def flat(states, fishers) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return sum p F, sum p F W and the mean, by layer."""
    triples = [system(states, fishers, P, layer) for layer in LAYERS]
    fs, bs, starts = zip(*triples, strict=True)
    return list(fs), list(bs), list(starts)


def by_torch_adam(fs, bs, starts, steps: int) -> list[Tensor]:
    weights = [start.clone().requires_grad_() for start in starts]
    optimizer = torch.optim.Adam(weights, lr=0.03, betas=(0.8, 0.95), eps=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        terms = zip(fs, bs, weights, strict=True)
        sum(w @ f @ w / 2 - b @ w for f, b, w in terms).backward()
        optimizer.step()
    return [w.detach() for w in weights]


@pytest.mark.parametrize("steps", [1, 7, 60])
def test_adam_is_adam(steps) -> None:
    states, fishers = clients(3)
    solver = Adam(steps, lr=0.03, betas=(0.8, 0.95), eps=0.02)
    found = merge(states, fishers, weights=P, solver=solver).state
    wanted = by_torch_adam(*flat(states, fishers), steps)
    for layer, w in zip(LAYERS, wanted, strict=True):
        torch.testing.assert_close(matrix(found, layer), w)


def test_the_published_form_of_adam() -> None:
    # Without averages and without bias correction; the root's eps differs between the kinds.
    states, fishers = clients(3)
    found = merge(states, fishers, weights=P, solver=Adam(30, form="published")).state
    for layer, f, b, w in zip(LAYERS, *flat(states, fishers), strict=True):
        mean, square = torch.zeros_like(w), torch.zeros_like(w)
        for _ in range(30):
            slope = f @ w - b
            mean, square = slope + 0.9 * mean, slope * slope + 0.99 * square
            inside = (square + 0.01).sqrt() if layer != NORM else square.sqrt() + 0.01
            w = w - 0.01 * mean / inside
        torch.testing.assert_close(matrix(found, layer), w)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_the_objective_at_every_iterate(solver, dtype) -> None:
    states, fishers = clients(3, dtype=dtype)
    seen = []

    def keep(state):
        seen.append(objective(state, states, fishers, P))
        return 0.0

    solver = type(solver)(**{**vars(solver), "every": 1})
    found = merge(states, fishers, weights=P, solver=solver, choose=keep)
    assert len(found.values) == found.iterations + 1 == len(seen)
    allowed = 100 * torch.finfo(dtype).eps * seen[0]
    assert max(abs(x - y) for x, y in zip(found.values, seen, strict=True)) <= allowed


@pytest.mark.parametrize("solver", SOLVERS[:4], ids=str)
def test_the_objective_falls(solver) -> None:
    states, fishers = clients(3)
    values = merge(states, fishers, solver=solver).values
    assert all(after < before for before, after in pairwise(values))


def test_conjugate_gradients_end_after_as_many_steps_as_there_are_eigenvalues() -> None:
    # Their sum has two eigenvalues, and both are in the residual of the start.
    one, other = torch.tensor([1.0, 1.0, 5.0]).double(), torch.tensor([3.0, 3.0, 1.0]).double()
    states = [{"w": torch.arange(12.0).view(3, 4).double()}, {"w": torch.ones(3, 4).double()}]
    fishers = [
        Fisher({"w": Kronecker("w", None, torch.eye(4).double(), torch.diag(g))}, {}, 1)
        for g in (one, other)
    ]
    assert merge(states, fishers, solver=ConjugateGradients(tolerance=1e-12)).iterations == 2


def test_a_kronecker_preconditioner_needs_fewer_iterations() -> None:
    # Eigenvalues over four decades, in bases that differ a little between clients.
    generator = torch.Generator().manual_seed(0)
    states, fishers = [], []
    for _ in range(3):
        states.append({"w": torch.randn(12, 15, generator=generator, dtype=torch.float64)})
        factors = []
        for size in (15, 12):
            near = torch.eye(size) + 0.05 * torch.randn(size, size, generator=generator)
            factors.append(near.double() * torch.logspace(0, -2, size).double() @ near.double().mT)
        fishers.append(Fisher({"w": Kronecker("w", None, *factors)}, {}, 1))
    plain, fewer = (
        merge(states, fishers, solver=ConjugateGradients(500, 1e-8, kind)).iterations
        for kind in (None, "kronecker")
    )
    assert fewer < plain


def test_a_diagonal_preconditioner_solves_diagonals_at_once() -> None:
    states, fishers = clients(3)
    same = [Fisher({"norm": fisher.layers["norm"]}, {}, 1) for fisher in fishers]
    for kind in ("diagonal", "kronecker"):
        solver = ConjugateGradients(tolerance=1e-12, preconditioner=kind)
        assert merge(states, same, solver=solver).iterations == 1


def test_layers_do_not_wait_for_each_other() -> None:
    # Each layer takes the steps that it takes alone, whatever else there is.
    states, fishers = clients(3)
    together = merge(states, fishers, weights=P, solver=ConjugateGradients(3)).state
    for name in ("conv", "fc", "norm"):
        alone = [Fisher({name: fisher.layers[name]}, {}, 1) for fisher in fishers]
        found = merge(states, alone, weights=P, solver=ConjugateGradients(3)).state
        for parameter in fishers[0].layers[name].parameters:
            assert torch.equal(found[parameter], together[parameter])


def test_a_direction_without_curvature_ends_a_layer() -> None:
    # The sum of these two has a negative eigenvalue, as a lossy compression may leave one.
    states = [{"w": torch.zeros(2, 1)}, {"w": torch.tensor([[0.0], [1.0]])}]
    bent = torch.diag(torch.tensor([1.0, -1.0]))
    fishers = [Fisher({"w": Kronecker("w", None, torch.ones(1, 1), bent)}, {}, 1)] * 2
    found = merge(states, fishers)
    assert found.iterations == 0 and torch.equal(found.state["w"], torch.tensor([[0.0], [0.5]]))


@pytest.mark.parametrize(
    ("solver", "steps"),
    [
        (ConjugateGradients(5), [0, 1, 2, 3, 4, 5]),
        (ConjugateGradients(5, every=2), [0, 2, 4, 5]),
        (GradientDescent(6, every=3), [0, 3, 6]),
        (Adam(250), [0, 100, 200, 250]),
    ],
)
def test_the_best_of_the_schedule_is_chosen(solver, steps) -> None:
    states, fishers = clients(3)
    for wanted in range(len(steps)):
        seen = []

        def choose(state, seen=seen, wanted=wanted):
            seen.append({name: x.clone() for name, x in state.items()})
            return -abs(len(seen) - 1 - wanted)

        found = merge(states, fishers, weights=P, solver=solver, choose=choose)
        assert list(found.scores) == steps and found.chosen == steps[wanted]
        assert found.iterations == steps[-1]
        assert all(torch.equal(found.state[name], seen[wanted][name]) for name in found.state)
        # And what is seen are the iterates that the solver ends with after so many steps.
        if steps[wanted] > 0:
            count = "iterations" if isinstance(solver, ConjugateGradients) else "steps"
            shorter = type(solver)(**{**vars(solver), count: steps[wanted]})
            last = merge(states, fishers, weights=P, solver=shorter).state
            assert all(torch.equal(found.state[name], last[name]) for name in last)


def test_the_first_of_equals_is_chosen_and_a_score_is_a_number() -> None:
    states, fishers = clients(2)
    found = merge(states, fishers, choose=lambda state: 1.0)
    mean = merge(states, method="fedavg").state
    assert found.chosen == 0 and torch.equal(found.state["fc.weight"], mean["fc.weight"])
    with pytest.raises(ValueError, match="choose must return a number, got nan for candidate 0"):
        merge(states, fishers, choose=lambda state: math.nan)


def test_nothing_to_do_is_no_iteration() -> None:
    states, _ = clients(2)
    zero = [Fisher({"n": Diagonal("norm.weight", torch.zeros(6).double())}, {}, 1)] * 2
    found = merge(states, zero)
    assert found.iterations == 0 and found.values == (0.0,)
    wanted = merge(states, method="fedavg").state["norm.weight"]
    for solver in SOLVERS:
        assert torch.equal(merge(states, zero, solver=solver).state["norm.weight"], wanted)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ConjugateGradients(0), "iterations must be >= 1, got 0"),
        (lambda: ConjugateGradients(every=0), "every must be >= 1, got 0"),
        (lambda: ConjugateGradients(tolerance=-1.0), "tolerance must be a finite number >= 0"),
        (lambda: ConjugateGradients(preconditioner="exact"), "preconditioner must be None or one"),
        (lambda: GradientDescent(rate=0.0), "rate must be a finite number > 0"),
        (lambda: Adam(lr=0.0), "lr must be a finite number > 0"),
        (lambda: Adam(betas=(0.9, 1.0)), "betas must be in"),
        (lambda: Adam(form="other"), "form must be one of"),
    ],
)
def test_settings_are_checked(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()
