"""Local SGD of many clients on networks of two layers, an epoch in one call.

The first layer is kept in the span of the client's n records: its weights are W0 + C^T X, with
coefficients C ``[n, h]``. Of records B it makes ``X_B W0^T + K_B C`` with K = X X^T, which takes
2 n h flops a record where weights take 4 d h, forward and backward.

Nothing here is private: what leaves a client is clipped and gets its noise elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.local_sgd import reference

__all__ = ["DTYPES", "is_compiled", "two_layer_epoch_"]

DTYPES = frozenset({torch.float32, torch.float64})


def two_layer_epoch_(
    coefficients: Tensor,
    weight: Tensor,
    hidden_bias: Tensor | None,
    bias: Tensor | None,
    *,
    grams: Sequence[Tensor],
    start: Tensor,
    order: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    counts: Sequence[int],
    batch_size: int,
    lr: float,
) -> None:
    """Let each of k clients go through its records once, ``batch_size`` at a time, by SGD.

    logits = W (relu(start_B + K_B C + hidden_bias) * mask) + bias; a step is lr times the gradient
    of the batch's mean cross-entropy. The last batch of a client is what is left.

    coefficients: C, ``[k, n, h]`` float32 or float64; rows past a client's count are not touched.
    weight: W, ``[k, classes, h]``. hidden_bias, bias: ``[k, h]`` and ``[k, classes]``, or None.
        These four are updated in place.
    grams: K of every client, ``[count, count]``, contiguous. start: X W0^T, ``[k, n, h]``.
    order: int64 ``[k, n]``, which of its records a client takes at each position.
    labels: int64 ``[k, n]``; mask: ``[k, n, h]`` >= 0, or None. Both are in that order.
    counts: records of every client, at most n.

    For each record 2 count h + 6 h classes flops. A client stays in one thread. Raises ValueError
    for bad input before anything is written.
    """
    op = "two_layer_epoch_"
    clients, most, hidden = coefficients.shape if coefficients.dim() == 3 else (-1, -1, -1)
    classes = weight.shape[1] if weight.dim() == 3 else -1
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "coefficients": (coefficients, (clients, most, hidden)),
        "weight": (weight, (clients, classes, hidden)),
        "hidden_bias": (hidden_bias, (clients, hidden)),
        "bias": (bias, (clients, classes)),
        "start": (start, (clients, most, hidden)),
        "mask": (mask, (clients, most, hidden)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and (
            tensor.shape != shape
            or tensor.dtype != coefficients.dtype
            or not tensor.is_contiguous()
            or tensor.dtype not in DTYPES
        ):
            raise ValueError(
                f"{op}: {name} must be contiguous {list(shape)} {coefficients.dtype}, float32 or "
                f"float64, got {list(tensor.shape)} {tensor.dtype}"
            )
    for name, table in (("order", order), ("labels", labels)):
        if table.shape != (clients, most) or table.dtype != torch.int64:
            raise ValueError(
                f"{op}: {name} must be [{clients}, {most}] int64, got {list(table.shape)} "
                f"{table.dtype}"
            )
    if len(grams) != clients or len(counts) != clients or batch_size < 1:
        raise ValueError(
            f"{op}: grams and counts must have one for each of {clients} clients and batch_size "
            f"must be >= 1, got {len(grams)}, {len(counts)} and {batch_size}"
        )
    run = backend.select(_two_layer_epoch, coefficients.device, coefficients.dtype)
    run(
        coefficients,
        weight,
        hidden_bias,
        bias,
        list(grams),
        start,
        order,
        labels,
        mask,
        list(counts),
        batch_size,
        lr,
    )


def is_compiled(like: Tensor) -> bool:
    """Return whether ``two_layer_epoch_`` runs compiled code for tensors such as this one."""
    if like.dtype not in DTYPES:
        return False
    return backend.select(_two_layer_epoch, like.device, like.dtype) is _two_layer_epoch.overload


def _fake_two_layer_epoch(*_: object) -> None:
    return None


_two_layer_epoch = backend.register(
    "two_layer_epoch_(Tensor(a!) coefficients, Tensor(b!) weight, Tensor(c!)? hidden_bias, "
    "Tensor(d!)? bias, Tensor[] grams, Tensor start, Tensor order, Tensor labels, Tensor? mask, "
    "int[] counts, int batch_size, float lr) -> ()",
    reference=reference.two_layer_epoch_,
    fake=_fake_two_layer_epoch,
    dtypes=DTYPES,
    # Clients of a simulation are on the CPU; on a GPU torch's operations serve.
    triton="dpkernels.ops.local_sgd.reference:two_layer_epoch_",
)
