"""Local SGD of a round's clients on sequential networks, in compiled code: a client, a thread."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.federated.local.chance import Levels, orders_of
from dpkernels.federated.problem import LocalSGD
from dpkernels.ops.network_sgd import Layer, network_epoch_

# Bytes of dropout levels that are drawn before they are used. No client's numbers depend on it;
# 50 clients of pfl-research's CIFAR shape take half of it. By size, not tuned.
_MOST_LEVELS = 2**26


@torch.no_grad()
def chained_updates(
    network: tuple[Layer, ...],
    x: Tensor,
    y: Tensor,
    rows: list[Tensor],
    theta: Tensor,
    local: LocalSGD,
    seeds: list[int],
) -> Tensor:
    """Return w - theta of every client after ``local``, ``[k, D]``; 0 without records.

    x: ``[N, ...]``. y: int64 ``[N]``. rows: of every client. theta: ``[D]`` or ``[k, D]``.
    """
    starts = theta.detach().reshape(-1, theta.shape[-1]).contiguous()
    found = starts.new_empty(len(rows), starts.shape[1])
    records = x.flatten(1).contiguous()
    most = max(map(len, rows), default=0)
    bytes_of = {0: 0, 256: 1, 65536: 2}
    drawn = most * sum(layer.features * bytes_of[layer.levels] for layer in network)
    at_once = max(torch.get_num_threads(), _MOST_LEVELS // max(1, drawn))
    for begin in range(0, len(rows), at_once):
        part = slice(begin, begin + at_once)
        own = starts if len(starts) == 1 else starts[part]
        _train(network, records, y, rows[part], own, local, seeds[part], found[part])
    return found


def _train(
    network: tuple[Layer, ...],
    records: Tensor,
    y: Tensor,
    rows: list[Tensor],
    starts: Tensor,
    local: LocalSGD,
    seeds: list[int],
    out: Tensor,
) -> None:
    """Write every client's w - start to ``out``."""
    counts = [len(part) for part in rows]
    dropping = [layer for layer in network if layer.levels]
    levels = Levels(
        seeds,
        counts,
        max(counts),
        [layer.features for layer in dropping],
        [layer.levels for layer in dropping],
    )
    orders = [orders_of(seed) for seed in seeds]
    velocity = torch.empty_like(out) if local.momentum else None
    table = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for epoch in range(local.epochs):
        for row, part, generator in zip(table, rows, orders, strict=True):
            row[: len(part)] = part[torch.randperm(len(part), generator=generator)]
        network_epoch_(
            out,
            starts,
            records=records,
            rows=table,
            labels=y[table],
            counts=counts,
            masks=levels.next_epoch(),
            layers=network,
            batch_size=local.batch_size,
            lr=local.lr,
            momentum=local.momentum,
            velocity=velocity,
            first=epoch == 0,
            last=epoch == local.epochs - 1,
        )
