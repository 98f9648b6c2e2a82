"""Merge models that were trained apart into one, by what each of them knows of its own data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from dpkernels.federated.merging import closed_form
from dpkernels.federated.merging.blocks import Block
from dpkernels.federated.merging.quadratic import Quadratic, quadratic
from dpkernels.federated.merging.solvers import ConjugateGradients, Solver
from dpkernels.federated.merging.states import (
    Score,
    State,
    best,
    check_alike,
    check_finite_states,
    mean,
    rounded,
    scored,
    shares,
)
from dpkernels.fisher import Fisher
from dpkernels.ops.checks import check_finite

Method = Literal["fedfisher", "fedavg", "fisher-merge", "regmean"]
DEFAULT_SOLVER = ConjugateGradients()


@dataclass(frozen=True)
class Merged:
    """The merged model, and how it was found.

    state: the state dict, in the dtypes of the clients'.
    iterations: how many the solver made; 0 for closed forms.
    chosen: which iterate ``state`` is, 0 for the mean; for closed forms which candidate.
    values: the objective at every iterate from the start, in float64; empty for closed forms.
    scores: what ``choose`` gave, by iterate or candidate.
    """

    state: dict[str, Tensor]
    iterations: int = 0
    chosen: int = 0
    values: tuple[float, ...] = ()
    scores: dict[int, float] = field(default_factory=dict)


def merge(
    states: Sequence[State],
    fishers: Sequence[Fisher] | None = None,
    *,
    weights: Sequence[float] | None = None,
    method: Method = "fedfisher",
    solver: Solver = DEFAULT_SOLVER,
    damping: float = 0.0,
    choose: Score | None = None,
) -> Merged:
    """Merge the clients' models into one; by FedFisher (6), from their weighted mean W(0).

    FedFisher minimises ``sum_i p_i (W - W_i)^T F_i (W - W_i) + sum_l mu_l |W_l - W_l(0)|^2``.

    states: the clients' state dicts, with the same keys, shapes and dtypes.
    fishers: one for each client, on the states' device, covering the same parameters in the same
        way; layers may have other names. Parameters that none covers are averaged, and so is every
        other tensor of floating point (BatchNorm's statistics). Tensors of integers or bool are
        those of the first client that counts. Not needed for ``fedavg``.
    weights: p_i in proportion, >= 0, such as numbers of records; None: equal. They weight F_i and
        the mean. A client of weight 0 is left out, Fisher and all.
    method: ``fedfisher``, or what ``closed_form`` has: ``fedavg``; ``fisher-merge``, by diagonals;
        ``regmean``, by the factors A of K-FAC: with ``choose`` the better of two scales, else .9.
    solver: of ``fedfisher``. damping: ``mu_l = damping tr(sum_i p_i F_i) / d_l`` for a layer of d_l
        weights (and bias), that many times the mean eigenvalue of its Fisher; pulls to the mean.
        The paper has none. Three small partitions of Fashion-MNIST, 50 iterations, accuracy: 50.3,
        43.8, 61.1 with .1; 49.0, 38.7, 60.9 with 0.
    choose: the score of a state dict, the higher the better, on data *that is declared public*: the
        best of the solver's schedule is returned, the first of equals. None: the last iterate.

    2 n O I (O + I) flops for every iteration and layer ``[O, I]`` of n clients, in float32, or in
    float64 where a weight or a factor is. Nothing here is private: F_i tells of records, and the
    first layer's A is the second moment of the inputs.

    Raises ValueError, before anything is computed, for states or fishers that do not fit together,
    by name, or that are not finite.
    """
    if method not in get_args(Method):
        raise ValueError(f"merge: method must be one of {get_args(Method)}, got {method!r}")
    check_finite("merge", "damping", damping, at_least=0.0)
    p = shares(len(states), weights)
    check_alike(states)
    clients = [client for client, share in enumerate(p) if share > 0]
    models, p = [states[client] for client in clients], [p[client] for client in clients]
    check_finite_states(models, clients)
    start = mean(models, p)
    if method == "fedavg":
        return _best_of([rounded(start, models[0])], choose)
    if fishers is None or len(fishers) != len(states):
        got = "none" if fishers is None else str(len(fishers))
        raise ValueError(
            f"merge: fishers must have one for each of {len(states)} states for {method!r}, got "
            f"{got}; take method='fedavg' without any"
        )
    infos = [fishers[client] for client in clients]
    if method == "fisher-merge":
        merged = closed_form.fisher_merge(models, infos, p, start, clients)
        return _best_of([rounded(merged, models[0])], choose)
    if method == "regmean":
        scales = closed_form.SCALES if choose else closed_form.SCALES[:1]
        found = (closed_form.regmean(models, infos, p, start, clients, scale=x) for x in scales)
        return _best_of((rounded(one, models[0]) for one in found), choose)
    blocks, objective = quadratic(models, infos, p, start, damping, clients)
    return minimised(start, models[0], blocks, objective, solver, choose)


def minimised(
    start: State,
    like: State,
    blocks: list[Block],
    objective: Quadratic,
    solver: Solver,
    choose: Score | None,
) -> Merged:
    """Follow the solver from ``start``, float64, and return the last or the chosen iterate.

    like: a state of the dtypes that the result is to have.
    """

    def state_of(moved: list[Tensor]) -> dict[str, Tensor]:
        state = dict(start)
        for block, tensor in zip(blocks, moved, strict=True):
            block.add_to(state, tensor)
        return rounded(state, like)

    values: list[float] = []
    scores: dict[int, float] = {}
    kept: dict[str, Tensor] = {}

    def look(step: int, moved: list[Tensor]) -> None:
        nonlocal kept
        assert choose is not None
        state = state_of(moved)
        scores[step] = scored(choose, state, step)
        if best(scores) == step:
            kept = state

    for step, moved, value in solver.iterates(objective):
        values.append(value)
        if choose is not None and step % solver.every == 0:
            look(step, moved)
    if choose is None:
        return Merged(state_of(moved), step, step, tuple(values))
    if step not in scores:
        look(step, moved)
    return Merged(kept, step, best(scores), tuple(values), scores)


def _best_of(candidates: Iterable[dict[str, Tensor]], choose: Score | None) -> Merged:
    found = list(candidates)
    if choose is None:
        return Merged(found[0])
    scores = {index: scored(choose, state, index) for index, state in enumerate(found)}
    return Merged(found[best(scores)], chosen=best(scores), scores=scores)
