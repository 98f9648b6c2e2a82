"""What the clients send besides Fishers: state dicts, how much each counts, and their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

State = Mapping[str, Tensor]
Score = Callable[[State], float]


def shares(count: int, weights: Sequence[float] | None) -> list[float]:
    """Return the p_i: ``weights`` over their sum, or 1 / count without any.

    Raises ValueError for another number of weights, for one that is negative or not finite, and
    where all are zero.
    """
    if count < 1:
        raise ValueError("merge: states must have at least one client's, got none")
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count:
        raise ValueError(
            f"merge: weights must have one for each of {count} states, got {len(given)}"
        )
    wrong = [weight for weight in given if not (math.isfinite(weight) and weight >= 0)]
    if wrong or not sum(given) > 0:
        raise ValueError(
            f"merge: weights must be finite, >= 0 and not all zero, got {given}; numbers of "
            "records do"
        )
    total = math.fsum(given)
    return [weight / total for weight in given]


def check_alike(states: Sequence[State]) -> None:
    """Raise ValueError unless all states have the keys, shapes, dtypes and device of the first."""
    first = states[0]
    for name, wanted in first.items():
        if not isinstance(wanted, Tensor):
            raise ValueError(
                f"merge: states[0][{name!r}] must be a tensor, got {type(wanted).__name__}; leave "
                "it out"
            )
    for client, state in enumerate(states[1:], 1):
        missing, more = first.keys() - state.keys(), state.keys() - first.keys()
        if missing or more:
            raise ValueError(
                f"merge: states[{client}] must have the keys of states[0]; it lacks "
                f"{_names(missing)} and has {_names(more)} besides"
            )
        for name, wanted in first.items():
            found = state[name]
            if _kind(found) != _kind(wanted):
                raise ValueError(
                    f"merge: states[{client}][{name!r}] must be {_text(wanted)} as in states[0], "
                    f"got {_text(found)}"
                )


def check_finite_states(states: Sequence[State], clients: Sequence[int]) -> None:
    """Raise ValueError where a floating-point number is none; ``clients``: their numbers."""
    for client, state in zip(clients, states, strict=True):
        for name, tensor in state.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"merge: states[{client}][{name!r}] must be finite; that client's training "
                    "diverged: give it weight 0"
                )


def mean(states: Sequence[State], p: Sequence[float]) -> dict[str, Tensor]:
    """Return ``sum_i p_i W_i`` of every tensor of floating point, in float64.

    Other tensors (counters, indices, masks) have no mean: they are the first state's.
    """
    found: dict[str, Tensor] = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            found[name] = first.detach().clone()
            continue
        total = torch.zeros_like(first, dtype=torch.float64)
        for share, state in zip(p, states, strict=True):
            total.add_(state[name].detach(), alpha=share)
        found[name] = total
    return found


def rounded(found: State, like: State) -> dict[str, Tensor]:
    """Return ``found`` in the dtypes of ``like``."""
    return {name: tensor.to(like[name].dtype) for name, tensor in found.items()}


def best(scores: Mapping[int, float]) -> int:
    """Return the first index with the highest score."""
    return max(scores, key=lambda index: (scores[index], -index))


def scored(choose: Score, state: State, index: int) -> float:
    """Return the score of a candidate; raise ValueError where it is not a number."""
    score = float(choose(state))
    if math.isnan(score):
        raise ValueError(f"merge: choose must return a number, got nan for candidate {index}")
    return score


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _names(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "none"
