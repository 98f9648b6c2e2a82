"""PFNM: units of all clients are matched by a Beta-Bernoulli process, layer by layer.

Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019, in the
form for deep and convolutional networks of Wang et al., "Federated learning with matched
averaging", ICLR 2020, without its retraining between layers: what FedFisher's authors compare with.

Units are matched by their distances only as far as these are large beside sigma: at the paper's
sigma = sigma0 = 1, a unit of squared norm far below 1 is new or not by the prior alone, which
makes each layer a few units wider, and such a unit is shrunk by half.

Differences from the code that they ran: all clients are gone through until nothing changes (there,
five times in random orders); the prior mean of a bias is 0 (there 0.1, and networks without biases
were given some); popularity counts as the posterior has it (there half of that, and capped at 10);
a layer's width has no bound unless ``most`` is given (there 700).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dpkernels.federated.merging.sequential import (
    Incoming,
    Parameters,
    chain_of_units,
    read,
    resized,
)
from dpkernels.federated.merging.unit_matching import Prior, global_units, match_units


def pfnm(
    model: nn.Module,
    states: Sequence[Mapping[str, Tensor]],
    *,
    sigma: float = 1.0,
    sigma0: float = 1.0,
    gamma: float = 7.0,
    class_counts: Tensor | Sequence[Sequence[float]] | None = None,
    most: int | None = None,
    sweeps: int = 100,
) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """Return the matched network, often wider than the clients', and its state dict.

    model: a sequential network, see ``chain_of_units``; it is not changed. states: the clients'
    state dicts, which may differ in the numbers of hidden units.
    sigma, sigma0, gamma: variances of a client's unit around its global unit and of a global unit
    around 0, and the mass of the process; the paper's values are the defaults. Larger gamma and
    smaller sigma give wider networks.
    class_counts: ``[clients, classes]``, each client's number of records of each class: the
    weights of the last layer, whose outputs are classes and need no matching, are averaged class
    by class by the clients' shares of it; a class that nobody has, and None: all the same.
    most: no hidden layer gets wider than this, or than the widest client's; None: no bound.
    sweeps: how often a layer's clients are matched anew, at most.

    A unit's vector is its incoming weights and bias, in the global units of the layer before: a
    global unit that the client lacks is a weight of 0. ``match_units`` has the cost of
    assignments, ``global_units`` the average of what matches.

    Cost: for each layer and client, in each sweep, L_j L D for L_j units and L global units of D
    weights and an assignment, about L^3 in the worst case.
    Who sees what: it needs each client's own model in the clear, view ``each_upload``, and the
    label counts of each client if they are given; no differential privacy.

    Raises ValueError for a model of another kind, states that do not fit, and settings and counts
    out of their range.
    """
    prior = Prior(sigma, sigma0, gamma)
    layers = chain_of_units("pfnm", model)
    if not states:
        raise ValueError("pfnm: states must have at least one client's, got none")
    shares = _class_shares(class_counts, len(states), layers[-1].units)
    for name, value, least in (("sweeps", sweeps, 0), ("most", most, 1)):
        if value is not None and value < least:
            raise ValueError(f"pfnm: {name} must be >= {least}, got {value}")
    clients = [read("pfnm", i, layers, state) for i, state in enumerate(states)]
    parts = _matched(layers, clients, shares, prior, sweeps, most)
    found = resized(model, layers, parts)
    return found, found.state_dict()


def _matched(
    layers: Sequence[Parameters],
    clients: Sequence[Sequence[Incoming]],
    shares: Tensor,
    prior: Prior,
    sweeps: int,
    most: int | None,
) -> list[Incoming]:
    """Return the global layers; shares: ``[clients, classes]`` of the last one."""
    found: list[Incoming] = []
    assignments: list[Tensor] | None = None
    for depth in range(len(layers)):
        parts = [client[depth] for client in clients]
        if assignments is not None:
            count = len(found[-1].weight)
            parts = [_spread(p, to, count) for p, to in zip(parts, assignments, strict=True)]
        units = [part.vectors for part in parts]
        if depth == len(layers) - 1:
            by_class = shares.to(units[0]).unsqueeze(2)
            return [*found, parts[0].of_vectors((by_class * torch.stack(units)).sum(0))]
        assignments = match_units(units, prior, sweeps=sweeps, most=most)
        found.append(parts[0].of_vectors(global_units(units, assignments, prior)))
    return found


def _spread(part: Incoming, assignment: Tensor, count: int) -> Incoming:
    """Return the layer with its inputs among ``count`` global units, 0 from those it lacks."""
    units, _, positions = part.weight.shape
    weight = part.weight.new_zeros(units, count, positions)
    return Incoming(weight.index_copy_(1, assignment, part.weight), part.bias)


def _class_shares(
    counts: Tensor | Sequence[Sequence[float]] | None, clients: int, classes: int
) -> Tensor:
    """Return each client's share of each class, ``[clients, classes]``, columns of sum 1."""
    even = torch.full((clients, classes), 1 / clients, dtype=torch.float64)
    if counts is None:
        return even
    given = torch.as_tensor(counts, dtype=torch.float64)
    if given.shape != even.shape:
        raise ValueError(
            f"pfnm: class_counts must be [clients, classes] = {list(even.shape)}, got "
            f"{list(given.shape)}"
        )
    if not bool((given.isfinite() & (given >= 0)).all()):
        raise ValueError("pfnm: class_counts must be finite and >= 0")
    totals = given.sum(0)
    return torch.where(totals > 0, given / totals, even)
