"""One epoch of SGD on networks of two layers in plain PyTorch, client by client."""

from __future__ import annotations

import torch
from torch import Tensor


def two_layer_epoch_(
    coefficients: Tensor,
    weight: Tensor,
    hidden_bias: Tensor | None,
    bias: Tensor | None,
    grams: list[Tensor],
    start: Tensor,
    order: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    counts: list[int],
    batch_size: int,
    lr: float,
) -> None:
    """Take the steps of ``dpkernels.ops.local_sgd.two_layer_epoch_``."""
    for i, count in enumerate(counts):
        for begin in range(0, count, batch_size):
            part = slice(begin, min(begin + batch_size, count))
            at = order[i, part]
            z = torch.addmm(start[i, at], grams[i][at], coefficients[i, :count])
            z = z if hidden_bias is None else z + hidden_bias[i]
            kept = torch.ones_like(z) if mask is None else mask[i, part]
            hidden = z.relu() * kept
            logits = hidden @ weight[i].mT
            logits = logits if bias is None else logits + bias[i]
            residuals = torch.softmax(logits, 1)
            residuals[torch.arange(len(at)), labels[i, part]] -= 1.0
            residuals *= -lr / len(at)
            back = (residuals @ weight[i]) * kept * (hidden != 0)
            weight[i].addmm_(residuals.mT, hidden)
            coefficients[i].index_add_(0, at, back)
            if bias is not None:
                bias[i] += residuals.sum(0)
            if hidden_bias is not None:
                hidden_bias[i] += back.sum(0)
