"""Sums of clipped gradients of many clients' records at once, for chains of linear layers.

The gradient of one record at a linear layer is d a^T: its squared norm is |d|^2 |a|^2, and |d|^2
more with a bias. Norms are float64, of the very a and d that are multiplied; factors are rounded
towards zero and multiply d; then one product per layer adds up all records of every client. So a
record adds (factor d) a^T, of norm at most the bound but for one rounding of d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.federated.local.batches import Batch, Batches
from dpkernels.federated.local.chain import Chain
from dpkernels.federated.local.sgd import gathered, masks_of
from dpkernels.federated.local.stacked import StackedNet
from dpkernels.ops.clip import clip_factors, row_sq_norms


@torch.no_grad()
def clipped_sums(
    chain: Chain,
    x: Tensor,
    y: Tensor,
    rows: list[Tensor],
    theta: Tensor,
    bound: float,
    *,
    at_a_time: int,
    seeds: list[int],
) -> Tensor:
    """Return each client's sum of records' gradients clipped to ``bound``, ``[k, D]``.

    x: ``[N, d]``. y: int64 ``[N]``. rows: of every client. theta: ``[D]`` or ``[k, D]``.
    at_a_time: records of all clients together in one pass. seeds: of the clients' dropout masks.

    A record that is not finite in any layer adds exactly zero. 6 D flops a record.
    """
    batches = Batches(rows, max(1, at_a_time // max(1, len(rows))), theta)
    start = theta.expand(len(rows), theta.shape[-1])
    found = torch.zeros_like(start, memory_format=torch.contiguous_format)
    if not batches.by_size:
        return found
    at = torch.tensor(batches.by_size, device=theta.device)
    net, sums = StackedNet(chain, start[at]), StackedNet(chain, found[at])
    kept = masks_of(net, batches, [seeds[i] for i in batches.by_size]).next_epoch()
    for batch in batches.steps:
        own = [part[batch.begin : batch.begin + batch.width] for part in batches.rows]
        padded = [
            torch.cat([part, batches.rows[i][:1].expand(batch.width - len(part))])
            for i, part in enumerate(own[: batch.clients])
        ]
        at_rows = torch.stack(padded)
        part = slice(batch.clients), batch.positions
        records = gathered(net, x, at_rows, batch)
        logits = net.forward(records, [mask[part] for mask in kept])
        residuals = net.backward(net.residuals(logits, y[at_rows]))
        _add_clipped(sums, net.inputs, residuals, batch, bound)
    found[at] = sums.parameters()
    return found


def _add_clipped(
    sums: StackedNet, inputs: list[Tensor], residuals: list[Tensor], batch: Batch, bound: float
) -> None:
    """Add the clipped gradients of one pass to ``sums``; inputs, residuals: ``[a, b, ...]``."""
    flat = [(a.flatten(0, 1), d.flatten(0, 1)) for a, d in zip(inputs, residuals, strict=True)]
    squares = torch.zeros(len(flat[0][0]), dtype=torch.float64, device=flat[0][0].device)
    for (a, d), bias in zip(flat, sums.biases, strict=True):
        of_inputs = row_sq_norms(a)
        squares += row_sq_norms(d) * (of_inputs if bias is None else of_inputs + 1.0)
    factors = clip_factors(squares, bound, dtype=inputs[0].dtype)
    if batch.absent is not None:
        factors.index_fill_(0, batch.absent, 0.0)
    # 0 times NaN is NaN: what is left out is set to zero, on both sides of the product.
    out = (factors == 0).nonzero().flatten()
    for layer, (a, d) in enumerate(flat):
        scaled = (d * factors.unsqueeze(1)).index_fill_(0, out, 0.0)
        scaled = scaled.view(batch.clients, batch.width, -1)
        if len(out):
            a = a.index_fill(0, out, 0.0)
        sums.weights[layer][: batch.clients].baddbmm_(scaled.mT, a.view(*scaled.shape[:2], -1))
        bias = sums.biases[layer]
        if bias is not None:
            bias[: batch.clients].add_(scaled.sum(1))
