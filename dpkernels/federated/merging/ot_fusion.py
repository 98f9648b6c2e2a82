"""OTFusion: units are aligned by optimal transport, layer by layer, then averaged.

Singh and Jaggi, "Model fusion via optimal transport", NeurIPS 2020, Algorithm 1, with weights as
the ground metric. Two choices are theirs in print but not in the code that FedFisher's authors ran:
the outputs are classes and stay where they are (that code transports them too), and plans are
always scaled by the marginals (that code also tries unscaled ones, with which a client's weights
shrink by a layer's width and little but the reference is left).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from dpkernels.federated.merging.sequential import Incoming, chain_of_units, read, resized
from dpkernels.federated.merging.states import shares

Cost = Literal["weights", "directions"]
_Solver = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def ot_fusion(
    model: nn.Module,
    states: Sequence[Mapping[str, Tensor]],
    *,
    weights: Sequence[float] | None = None,
    cost: Cost = "weights",
    reference: int = 0,
) -> dict[str, Tensor]:
    """Return the state of the average of clients whose units were carried to the reference's.

    model: a sequential network, see ``chain_of_units``. states: the clients' state dicts; they may
    differ in the numbers of hidden units. weights: what a client counts, its number of records
    say; None: all the same. reference: the client whose units the others' are carried to, and
    whose widths the result has.
    cost: of carrying a unit to another: the squared distance of their incoming weights and biases
    ("weights", as in the paper), or of these at length 1 ("directions": ReLU units with equal
    directions differ by a scale that the next layer can undo).

    For layer l of client k, with the plan T of the layer before (Algorithm 1):
    ``W^ = W_k T^(l-1)``, ``T^l = argmin <T, D(W^, W_ref)>`` over plans with uniform marginals,
    ``W~ = (T^l)^T W^``; the result is the mean of all W~. Plans of equal widths are permutations.
    Of unequal ones, the incoming weights of a unit are means (columns of T sum to 1), and its
    outgoing weights are split (rows sum to 1), which leaves the function of a client alone whose
    units the reference only has several times; the paper scales both by columns.

    Cost: for each client and layer, n^2 D for the distances of n units with D weights, and an
    exact transport, about n^3 in the worst case.
    Who sees what: it needs each client's own model in the clear, view ``each_upload``; no secure
    aggregation, and no differential privacy unless the clients' training has it.

    Raises ImportError without the library POT, and ValueError for a model of another kind, states
    that do not fit, and unknown costs and references.
    """
    if cost not in ("weights", "directions"):
        raise ValueError(f"ot_fusion: cost must be 'weights' or 'directions', got {cost!r}")
    layers = chain_of_units("ot_fusion", model)
    p = shares(len(states), weights)
    if not 0 <= reference < len(states):
        raise ValueError(
            f"ot_fusion: reference must be one of {len(states)} clients, got {reference}"
        )
    solver = _exact_transport()
    clients = [read("ot_fusion", i, layers, state) for i, state in enumerate(states)]
    carried = [
        client if i == reference else _carried(client, clients[reference], cost, solver)
        for i, client in enumerate(clients)
    ]
    means = [_mean(same, p) for same in zip(*carried, strict=True)]
    fused = resized(model, layers, means).state_dict()
    return {name: fused[name].to(tensor) for name, tensor in states[reference].items()}


def _carried(
    client: Sequence[Incoming], target: Sequence[Incoming], cost: Cost, solver: _Solver
) -> list[Incoming]:
    """Return the client's layers with one unit for each of the target's."""
    found: list[Incoming] = []
    outgoing: Tensor | None = None
    for mine, wanted in zip(client, target, strict=True):
        weight = mine.weight
        if outgoing is not None:
            weight = torch.einsum("oup,ur->orp", weight, outgoing)
        moved = Incoming(weight, mine.bias)
        if len(found) == len(client) - 1:
            return [*found, moved]
        plan = _plan(moved.vectors, wanted.vectors, cost, solver)
        found.append(moved.of_vectors(plan.T @ moved.vectors))
        outgoing = plan * (plan.shape[0] / plan.shape[1])
    return found


def _plan(mine: Tensor, wanted: Tensor, cost: Cost, solver: _Solver) -> Tensor:
    """Return the cheapest plan ``[mine, wanted]`` with columns of sum 1 and equal rows."""
    if cost == "directions":
        mine, wanted = (torch.nn.functional.normalize(rows, dim=1) for rows in (mine, wanted))
    squares = mine.square().sum(1, keepdim=True) + wanted.square().sum(1)
    distances = (squares - 2 * mine @ wanted.T).clamp_min(0)
    mass = np.full(len(mine), len(wanted) / len(mine))
    # Whole masses make a plan of equal widths a permutation of exact zeros and ones.
    plan = solver(mass, np.ones(len(wanted)), distances.cpu().numpy())
    return torch.as_tensor(plan, dtype=torch.float64).to(mine.device)


def _mean(parts: Sequence[Incoming], p: Sequence[float]) -> Incoming:
    rows = sum(
        (share * part.vectors for share, part in zip(p, parts, strict=True)),
        torch.zeros_like(parts[0].vectors),
    )
    return parts[0].of_vectors(rows)


def _exact_transport() -> _Solver:
    try:
        import ot
    except ImportError as error:
        raise ImportError(
            "ot_fusion: optimal transport is solved by the library POT; "
            "pip install 'dpkernels[fusion]'"
        ) from error
    solver: _Solver = ot.emd
    return solver
