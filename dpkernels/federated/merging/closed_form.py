"""Merging without iterations: FisherMerge (Matena and Raffel, 2022), RegMean (Jin et al., 2023).

Both start from the weighted mean, which is FedAvg's model and what parameters without F keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.federated.merging.blocks import Block, Factors, blocks_of
from dpkernels.federated.merging.states import State
from dpkernels.fisher import Diagonal, Fisher, Kronecker

# FisherMerge leaves weights with less information than this at the mean (the authors' floor).
FLOOR = 1e-6
# What RegMean scales off-diagonals by; FedFisher's comparison chooses between these two.
SCALES = (0.9, 0.1)


def fisher_merge(
    states: Sequence[State],
    fishers: Sequence[Fisher],
    p: Sequence[float],
    start: State,
    clients: Sequence[int],
    *,
    floor: float = FLOOR,
) -> dict[str, Tensor]:
    """Return ``sum_i p_i f_i W_i / sum_i p_i f_i``, weight by weight, in float64.

    f_i: the diagonal of F_i; of K-FAC ``G_oo A_ii``. Where the sum is below ``floor``: the mean.
    start: the weighted mean, float64. clients: their numbers, for messages.
    """
    blocks, factors = blocks_of(states, fishers, clients)
    merged = dict(start)
    for block, found in zip(blocks, factors, strict=True):
        middle = block.join(start)
        total, moment = torch.zeros_like(middle), torch.zeros_like(middle)
        for share, state, layer in zip(p, states, found, strict=True):
            weighted = _diagonal(layer) * share
            total += weighted
            moment += weighted * (block.join(state).double() - middle)
        enough = total >= floor
        block.add_to(merged, torch.where(enough, moment / torch.where(enough, total, 1), 0))
    return merged


def regmean(
    states: Sequence[State],
    fishers: Sequence[Fisher],
    p: Sequence[float],
    start: State,
    clients: Sequence[int],
    *,
    scale: float = SCALES[0],
    linear_only: bool = False,
) -> dict[str, Tensor]:
    """Return ``(sum_i p_i W_i A_i) (sum_i p_i A_i)^-1`` for every layer of K-FAC, in float64.

    That is the least-squares fit to what every client's layer makes of its own inputs. A_i: the
    second moments of the layer's inputs, whose off-diagonals are scaled by ``scale``, in [0, 1). A
    bias is one more input, where the published code averages biases; convolutions are merged too
    unless ``linear_only``, as there. Inputs that are 0 at all clients keep the mean's weights.
    Diagonals are of no use here: their parameters keep the mean.

    start: the weighted mean, float64. clients: their numbers, for messages.
    """
    if not 0 <= scale < 1:
        raise ValueError(f"regmean: scale must be in [0, 1), got {scale}")
    blocks, factors = blocks_of(states, fishers, clients)
    if not any(block.kronecker for block in blocks):
        raise ValueError(
            "merge: 'regmean' needs the factors A of Kronecker Fishers, got none; take "
            "fisher_information(kind='kronecker'), or method='fisher-merge'"
        )
    merged = dict(start)
    for block, found in zip(blocks, factors, strict=True):
        if block.kronecker and not (linear_only and _is_convolution(block, start)):
            grams = [layer.a for layer in found if isinstance(layer, Kronecker)]
            moved = [block.join(state).double() - block.join(start) for state in states]
            block.add_to(merged, _least_squares(grams, moved, p, scale))
    return merged


def _least_squares(
    grams: Sequence[Tensor], moved: Sequence[Tensor], p: Sequence[float], scale: float
) -> Tensor:
    """Return ``(sum_i p_i D_i A_i) (sum_i p_i A_i)^-1``, ``[O, I]``; O(I^3 + n O I^2).

    With its rows and columns scaled to a unit diagonal the sum is at least (1 - scale) I, so it is
    factored as it is.
    """
    total, moment = torch.zeros_like(grams[0], dtype=torch.float64), torch.zeros_like(moved[0])
    for share, gram, one in zip(p, grams, moved, strict=True):
        scaled = gram.double() * (share * scale)
        scaled.diagonal().copy_(gram.diagonal().double() * share)
        total += scaled
        moment += one @ scaled
    diagonal = total.diagonal()
    live = diagonal > 0
    roots = torch.where(live, diagonal, 1).rsqrt()
    total = total * roots * roots[:, None]
    total.diagonal()[~live] = 1
    factor = torch.linalg.cholesky((total + total.mT) / 2)
    return torch.cholesky_solve((moment * roots).mT, factor).mT * roots * live


def _diagonal(layer: Factors) -> Tensor:
    if isinstance(layer, Diagonal):
        return layer.values.double()
    return torch.outer(layer.g.diagonal().double(), layer.a.diagonal().double())


def _is_convolution(block: Block, state: State) -> bool:
    return block.weight is not None and state[block.weight].dim() > 2
