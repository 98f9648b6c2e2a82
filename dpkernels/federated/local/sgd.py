"""Local SGD of all clients of a round on a stacked chain: the same steps as each takes alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpkernels.federated.local.batches import Batch, Batches
from dpkernels.federated.local.chain import Chain
from dpkernels.federated.local.chance import Masks
from dpkernels.federated.local.gram import SpannedLayer
from dpkernels.federated.local.stacked import StackedNet
from dpkernels.federated.problem import LocalSGD

# Returns K of client ``i`` of the cohort.
GramOf = Callable[[int], Tensor]


@torch.no_grad()
def stacked_updates(
    chain: Chain,
    x: Tensor,
    y: Tensor,
    rows: list[Tensor],
    theta: Tensor,
    local: LocalSGD,
    seeds: list[int],
    gram_of: GramOf | None = None,
) -> Tensor:
    """Return w - theta of every client after ``local``, ``[k, D]``; 0 without records.

    x: ``[N, d]``. y: int64 ``[N]``. rows: of every client. theta: ``[D]`` or ``[k, D]``.
    gram_of: None to take products with the records; else the first layer is kept in their span.

    For each step 6 b D flops per client, less 2 b of the first layer's.
    """
    batches = Batches(rows, local.batch_size, theta)
    start = theta.expand(len(rows), theta.shape[-1])
    found = torch.zeros_like(start, memory_format=torch.contiguous_format)
    if not batches.by_size:
        return found
    at = torch.tensor(batches.by_size, device=theta.device)
    net = StackedNet(chain, start[at], local.momentum)
    training = _Training(net, x, y, batches, local)
    span = None
    if gram_of is not None:
        grams = [gram_of(i) for i in batches.by_size]
        span = SpannedLayer(net, x, batches, grams, local.momentum)
    training.run([seeds[i] for i in batches.by_size], batches.orders(seeds), span)
    found[at] = net.parameters() - start[at]
    return found


class _Training:
    """The epochs of one round."""

    def __init__(
        self, net: StackedNet, x: Tensor, y: Tensor, batches: Batches, local: LocalSGD
    ) -> None:
        self.net, self.x, self.y, self.batches, self.local = net, x, y, batches, local
        most = batches.most
        # Where each client's records are in x, padded with its first: [k, most].
        self.table = torch.stack(
            [torch.cat([rows, rows[:1].expand(most - len(rows))]) for rows in batches.rows]
        )
        scaled = (local.lr * step.weights for step in batches.steps)
        self.weights = [weights.unsqueeze(1) for weights in scaled]

    def run(
        self, seeds: list[int], orders: list[torch.Generator], span: SpannedLayer | None
    ) -> None:
        """Take all steps of all epochs; span: the first layer if it is kept as coefficients."""
        masks = masks_of(self.net, self.batches, seeds)
        places = torch.empty_like(self.table)
        for _ in range(self.local.epochs):
            order = self.batches.epoch(orders, places)
            rows = self.table.gather(1, order)
            labels, kept = self.y[rows], masks.next_epoch()
            if span is not None and span.is_compiled:
                span.epoch(order, labels, kept, self.local)
                continue
            for batch, weights in zip(self.batches.steps, self.weights, strict=True):
                part = slice(batch.clients), batch.positions
                own = [mask[part] for mask in kept]
                if span is None:
                    logits = self.net.forward(gathered(self.net, self.x, rows[part], batch), own)
                else:
                    logits = self.net.forward_from(span.outputs(order[part], batch), own)
                residuals = self.net.residuals(logits, labels[part]).mul_(weights)
                back = self.net.backward(residuals)
                self.net.step(back, begin=0 if span is None else 1)
                if span is not None:
                    span.step(back[0])
        if span is not None:
            span.finish()


def masks_of(net: StackedNet, batches: Batches, seeds: list[int]) -> Masks:
    """Return the dropout masks of all clients of the net, ``[k, most, width]`` for each layer."""
    widths, rates = [], []
    for block in net.chain:
        for op in block.before:
            if op.kind == "dropout":
                widths.append(block.inputs)
                rates.append(op.rate)
    return Masks(seeds, batches.counts, batches.most, widths, rates, net.weights[0])


def gathered(net: StackedNet, x: Tensor, rows: Tensor, batch: Batch) -> Tensor:
    """Return the records of a step, ``[a, b, d]``, zero where a client has none."""
    out = net.buffer("records", rows.numel(), x.shape[1])
    torch.index_select(x, 0, rows.reshape(-1), out=out)
    if batch.absent is not None:
        out.index_fill_(0, batch.absent, 0.0)
    return out.view(*rows.shape, x.shape[1])
