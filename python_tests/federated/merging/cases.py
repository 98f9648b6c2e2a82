"""Clients to merge, made of numbers, and their Fishers as dense matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.fisher import Diagonal, Fisher, Kronecker

State = dict[str, Tensor]
CONVOLUTION, LINEAR, NORM = ("conv.weight", "conv.bias"), ("fc.weight",), ("norm.weight",)
# A convolution 2-3 of 2 x 2 with bias, a linear layer 5-4, a scale with a diagonal; without F: a
# parameter, statistics, a counter.
SHAPES = {
    "conv.weight": (3, 2, 2, 2),
    "conv.bias": (3,),
    "fc.weight": (4, 5),
    "norm.weight": (6,),
    "free": (2, 3),
    "bn.running_mean": (3,),
}


def semidefinite(size: int, rank: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return a matrix with ``rank`` eigenvalues between 1/2 and 2, the others 0."""
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    eigenvalues = 0.5 + 1.5 * torch.rand(rank, generator=generator, dtype=torch.float64)
    return ((basis[:, :rank] * eigenvalues) @ basis[:, :rank].mT).to(dtype)


def clients(
    count: int, seed: int = 0, *, lost: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[list[State], list[Fisher]]:
    """Return states and Fishers; ``lost``: by how much the ranks of the factors fall short."""
    generator = torch.Generator().manual_seed(seed)
    states, fishers = [], []
    for client in range(count):
        state = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, shape in SHAPES.items()
        }
        state["bn.num_batches_tracked"] = torch.tensor(10 + client)

        def factor(size: int) -> Tensor:
            return semidefinite(size, size - lost, generator, dtype)

        values = 0.5 + torch.rand(6, generator=generator, dtype=torch.float64).to(dtype)
        values[:lost] = 0
        layers = {
            "conv": Kronecker("conv.weight", "conv.bias", factor(9), factor(3)),
            "norm": Diagonal("norm.weight", values),
            "fc": Kronecker("fc.weight", None, factor(5), factor(4)),
        }
        states.append(state)
        fishers.append(Fisher(layers, {"free": "no rule"}, 10))
    return states, fishers


def matrix(state: State, parameters: Sequence[str]) -> Tensor:
    """Return a layer's weights as a vector, float64: of [weight, bias] row by row."""
    columns = [state[name].double().reshape(state[name].shape[0], -1) for name in parameters]
    return torch.cat(columns, 1).flatten()


def dense(fisher: Fisher, parameters: Sequence[str]) -> Tensor:
    """Return F of the layer with these parameters, float64, for ``matrix``."""
    (layer,) = (x for x in fisher.layers.values() if x.parameters == tuple(parameters))
    if isinstance(layer, Diagonal):
        return torch.diag(layer.values.double().flatten())
    return torch.kron(layer.g.double(), layer.a.double())


def system(
    states: Sequence[State],
    fishers: Sequence[Fisher],
    p: Sequence[float],
    parameters: Sequence[str],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``sum p F``, ``sum p F W`` and ``sum p W`` of a layer."""
    triples = [
        (share * dense(f, parameters), matrix(s, parameters), share)
        for s, f, share in zip(states, fishers, p, strict=True)
    ]
    zero = torch.zeros((), dtype=torch.float64)
    return (
        sum((f for f, _, _ in triples), zero),
        sum((f @ w for f, w, _ in triples), zero),
        sum((share * w for _, w, share in triples), zero),
    )


def objective(
    state: State,
    states: Sequence[State],
    fishers: Sequence[Fisher],
    p: Sequence[float],
) -> float:
    """Return ``sum_i p_i (W - W_i)^T F_i (W - W_i)`` over all layers."""
    total = 0.0
    for parameters in (CONVOLUTION, LINEAR, NORM):
        for client, fisher, share in zip(states, fishers, p, strict=True):
            moved = matrix(state, parameters) - matrix(client, parameters)
            total += share * float(moved @ dense(fisher, parameters) @ moved)
    return total
