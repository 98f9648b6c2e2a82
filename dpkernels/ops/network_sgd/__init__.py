"""Local SGD of many clients on sequential networks, an epoch in one call.

Convolutions, max-pooling, ReLU, tanh and dropout, then linear layers. A client stays in one thread,
with its weights and all that it works in. Backward convolutions take only numbers that are not
zero: through a 2 x 2 max-pooling, at most a quarter come back.

Nothing here is private: what leaves a client is clipped and gets its noise elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.network_sgd import reference
from dpkernels.ops.network_sgd.layers import Layer, Window

__all__ = ["DTYPES", "Layer", "Window", "is_compiled", "network_epoch_"]

DTYPES = frozenset({torch.float32, torch.float64})


def network_epoch_(
    parameters: Tensor,
    theta: Tensor,
    *,
    records: Tensor,
    rows: Tensor,
    labels: Tensor,
    counts: Sequence[int],
    masks: Sequence[Tensor],
    layers: Sequence[Layer],
    batch_size: int,
    lr: float,
    momentum: float = 0.0,
    velocity: Tensor | None = None,
    first: bool = True,
    last: bool = True,
) -> None:
    """Let each of k clients go through its records once, ``batch_size`` at a time, by SGD.

    A step is u <- momentum u - lr g, w <- w + u, with g the gradient of the batch's mean
    cross-entropy: u is -lr times the velocity of ``torch.optim.SGD``. The last batch of a client is
    what is left.

    parameters: ``[k, D]`` float32 or float64, contiguous, written. Each client's w after its
        steps, or w - theta if ``last``: then nothing is left to do but to read it once.
    theta: ``[1, D]`` or ``[k, D]``, where clients start if ``first``; else at ``parameters``.
    records: ``[N, ...]`` flattened to ``[N, C H W]``, of all clients.
    rows, labels: int64 ``[k, n]``: which record a client takes at each position, and its class.
    counts: records of every client, at most n.
    masks: for every layer with dropout, ``[k, n, H W C]`` random levels, channels last: uint8 for
        256 levels, uint16 for 65536.
    momentum: in [0, 1). velocity: u, like ``parameters``, written; read unless ``first``. Given
        with momentum, and only with it.
    layers: at least one; linear ones come last, and the very last has nothing after it.

    For each record 2 flops a weight and position forward, and 4 backward for those numbers that
    are not zero. Raises ValueError for bad input before anything is written.
    """
    op = "network_epoch_"
    clients, size = parameters.shape if parameters.dim() == 2 else (-1, -1)
    for name, tensor in (("parameters", parameters), ("theta", theta), ("records", records)):
        if tensor.dim() != 2 or tensor.dtype not in DTYPES or tensor.dtype != parameters.dtype:
            raise ValueError(
                f"{op}: {name} must be of 2 dimensions and float32 or float64, as parameters "
                f"are, got {list(tensor.shape)} {tensor.dtype}"
            )
    if theta.shape[1] != size or theta.shape[0] not in (1, clients):
        raise ValueError(
            f"{op}: theta must be [1, {size}] or [{clients}, {size}], got {list(theta.shape)}"
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"{op}: momentum must be in [0, 1), got {momentum}")
    if (velocity is not None) != (momentum > 0):
        raise ValueError(
            f"{op}: velocity goes with momentum, got momentum {momentum} "
            f"{'and' if velocity is not None else 'without'} velocity"
        )
    if velocity is not None and (
        velocity.shape != parameters.shape or velocity.dtype != parameters.dtype
    ):
        raise ValueError(
            f"{op}: velocity must be {list(parameters.shape)} {parameters.dtype}, as parameters "
            f"are, got {list(velocity.shape)} {velocity.dtype}"
        )
    for name, table in (("rows", rows), ("labels", labels)):
        if table.shape != rows.shape or table.dim() != 2 or table.dtype != torch.int64:
            raise ValueError(
                f"{op}: {name} must be [{clients}, n] int64, got {list(table.shape)} {table.dtype}"
            )
    if len(rows) != clients or len(counts) != clients or batch_size < 1 or not layers:
        raise ValueError(
            f"{op}: rows and counts must have one for each of {clients} clients, batch_size and "
            f"the number of layers must be >= 1, got {len(rows)}, {len(counts)}, {batch_size} and "
            f"{len(layers)}"
        )
    run = backend.select(_network_epoch, parameters.device, parameters.dtype)
    numbers = [number for layer in layers for number in layer.numbers()]
    tables = records, rows, labels, list(counts), list(masks)
    run(parameters, velocity, theta, *tables, numbers, batch_size, lr, momentum, first, last)


def is_compiled(like: Tensor) -> bool:
    """Return whether ``network_epoch_`` runs compiled code for tensors such as this one."""
    if like.dtype not in DTYPES:
        return False
    return backend.select(_network_epoch, like.device, like.dtype) is _network_epoch.overload


def _fake_network_epoch(*_: object) -> None:
    return None


_network_epoch = backend.register(
    "network_epoch_(Tensor(a!) parameters, Tensor(b!)? velocity, Tensor theta, Tensor records, "
    "Tensor rows, Tensor labels, int[] counts, Tensor[] masks, int[] layers, int batch_size, "
    "float lr, float momentum, bool first, bool last) -> ()",
    reference=reference.network_epoch_,
    fake=_fake_network_epoch,
    dtypes=DTYPES,
    # Clients of a simulation are on the CPU; on a GPU torch's operations serve.
    triton="dpkernels.ops.network_sgd.reference:network_epoch_",
)
