"""Counter-based Gaussian noise: ``x <- scale * (x + std * z)`` in one pass over memory.

``z`` is a pure function of (key, counter, element index): the same on every backend (to the float
tolerance of log, cos and sin), for any number of threads, whatever was drawn before. The stream is
defined in ``reference.py``: Philox 4x32-10 and Box-Muller, with tails to 11.6 sigma. What lies
beyond, at most ``UNREACHABLE_MASS`` of an element's noise, belongs in the statement of a release.

A (key, counter) pair must never be used for two releases: their difference would show the data
without noise. Pass a ``NoiseKey``, which hands out each counter once; or, for many clients in one
call, what ``RowKeys`` reserves.

Philox passes the usual statistical batteries but is not a cryptographic generator, and the sum of
two floats does not hide the low bits of the sum it protects (Mironov 2012).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.checks import check_finite, check_writable
from dpkernels.ops.noise import reference
from dpkernels.ops.noise.key import NoiseKey
from dpkernels.ops.noise.reference import UNREACHABLE_MASS
from dpkernels.ops.noise.row_keys import RowKeys

__all__ = [
    "DTYPES",
    "UNREACHABLE_MASS",
    "NoiseKey",
    "RowKeys",
    "add_gaussian_noise_",
    "add_row_noise_",
]

DTYPES = frozenset({torch.float32, torch.float64})


def add_gaussian_noise_(
    x: Tensor | Sequence[Tensor],
    std: float,
    key: NoiseKey | int,
    counter: int | None = None,
    *,
    scale: float = 1.0,
) -> None:
    """Add N(0, std^2) to every element of ``x`` in place, then multiply by ``scale``.

    x: float32 or float64 of any shape and strides, or a list of such sharing dtype and device and
        with address ranges that do not overlap.
        Half precision is refused: a sum rounded to it before the noise has another sensitivity.
    std: 0, or a normal number of x's dtype: the standard deviation of the noise before scaling
        (sigma C for a clipped sum).
    key: a ``NoiseKey``, of which as many counters are used up as there are tensors; or 64 bits,
        signed or unsigned, and a counter. (Inside a function that is compiled whole, reserve the
        counters outside and pass numbers.)
    counter: with a number as key only: >= 0; tensor i of a list uses counter + i.
    scale: applied to the noisy value (1 / expected batch size, usually).

    About 60 flops an element; n elements read and written. Raises ValueError for bad input before
    anything is written.
    """
    op = "add_gaussian_noise_"
    tensors = [x] if isinstance(x, Tensor) else list(x)
    for tensor in tensors:
        _check_dtype(op, tensor)
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise ValueError(
                f"{op}: all of x must share dtype and device, got {tensors[0].dtype} on "
                f"{tensors[0].device} and {tensor.dtype} on {tensor.device}"
            )
    if not tensors:
        return
    _check_numbers(op, tensors[0].dtype, std, scale)
    check_writable(op, "x", tensors, [])
    key, counter = _key_and_counter(op, key, counter, len(tensors))
    run = backend.select(_add_gaussian_noise, tensors[0].device, tensors[0].dtype)
    run(tensors, std, key, counter, scale)


def add_row_noise_(
    x: Tensor, std: float, keys: Tensor, counters: Tensor, *, scale: float = 1.0
) -> None:
    """Add N(0, std^2) to every row of ``x`` in place, each from its own stream, then scale.

    Row i becomes ``scale * (x_i + std * z_i)``, where z_i is the stream (keys[i], counters[i]): bit
    for bit what ``add_gaussian_noise_(x_i, std, keys[i], counters[i], scale=scale)`` writes on the
    same backend, whatever other rows are in the call and whatever the number of threads.

    x: float32 or float64 ``[k, ...]``, k >= 0. Every row is contiguous; rows may lie apart
        (``x.stride(0)`` larger than a row), but not overlap. Other layouts are refused.
    std: 0, or a normal number of x's dtype: the standard deviation of the noise before scaling.
    keys, counters: int64 ``[k]``, on the CPU whatever x's device: they are checked there, and a
        GPU gets both in one transfer. Counters are >= 0, and no (key, counter) pair comes twice.
        ``RowKeys.reserve`` hands out both.
    scale: applied to the noisy value.

    About 60 flops an element; n elements read and written, and 16 k bytes of keys and counters.
    The check for pairs that come twice takes 0.004 us a row. Raises ValueError for bad input
    before anything is written. (In a graph that ``torch.compile`` makes of the reference, bad
    values in keys and counters raise RuntimeError.)
    """
    op = "add_row_noise_"
    _check_dtype(op, x)
    if x.dim() == 0:
        raise ValueError(
            f"{op}: x must be [k, ...], a row for each key, got a number; pass x[None]"
        )
    for name, each in (("keys", keys), ("counters", counters)):
        fits = each.dtype == torch.int64 and each.dim() == 1 and each.shape[0] == x.shape[0]
        if not fits or each.device.type != "cpu":
            raise ValueError(
                f"{op}: {name} must be int64 [{x.shape[0]}] on the CPU, one for each row of x, got "
                f"{list(each.shape)} {each.dtype} on {each.device}; RowKeys makes them"
            )
    _check_numbers(op, x.dtype, std, scale)
    check_writable(op, "x", [x], [keys, counters])
    if x.numel() > 0 and not x[0].is_contiguous():
        raise ValueError(
            f"{op}: x must have contiguous rows, got shape {list(x.shape)} with strides "
            f"{list(x.stride())}; pass x.contiguous() and copy the result back"
        )
    run = backend.select(_add_row_noise, x.device, x.dtype)
    run(x, std, keys, counters, scale)


def _check_dtype(op: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(
            f"{op}: x must be float32 or float64, got {x.dtype}; add the noise to the float32 sum, "
            "then convert"
        )


def _check_numbers(op: str, dtype: torch.dtype, std: float, scale: float) -> None:
    check_finite(op, "std", std, at_least=0.0)
    limits = torch.finfo(dtype)
    if std != 0 and not limits.tiny <= std <= limits.max:
        raise ValueError(
            f"{op}: std must be 0 or from {limits.tiny:g} to {limits.max:g} for {dtype}, got {std}"
        )
    check_finite(op, "scale", scale)


def _key_and_counter(
    op: str, key: NoiseKey | int, counter: int | None, count: int
) -> tuple[int, int]:
    """Return the key, signed, and the first of ``count`` counters."""
    if isinstance(key, NoiseKey):
        if counter is not None:
            raise ValueError(f"{op}: counter must be left out with a NoiseKey, which has its own")
        return key.key, key.reserve(count)
    if counter is None:
        raise ValueError(f"{op}: counter is missing; pass a NoiseKey, or a key and a counter")
    if not -(2**63) <= key < 2**64:
        raise ValueError(f"{op}: key must fit in 64 bits, got {key}; NoiseKey makes them")
    if counter < 0 or counter > 2**63 - count:
        raise ValueError(f"{op}: counter must be in [0, 2^63), got {counter}; NoiseKey makes them")
    return key - 2**64 if key >= 2**63 else key, counter


def _fake_add_gaussian_noise(
    xs: list[Tensor], std: float, key: int, counter: int, scale: float
) -> None:
    return None


_add_gaussian_noise = backend.register(
    "add_gaussian_noise_(Tensor(a!)[] xs, float std, SymInt key, SymInt counter, float scale) "
    "-> ()",
    reference=reference.add_gaussian_noise_,
    fake=_fake_add_gaussian_noise,
    dtypes=DTYPES,
    triton="dpkernels.ops.noise.triton_impl:add_gaussian_noise_",
)


def _fake_add_row_noise(
    x: Tensor, std: float, keys: Tensor, counters: Tensor, scale: float
) -> None:
    return None


_add_row_noise = backend.register(
    "add_row_noise_(Tensor(a!) x, float std, Tensor keys, Tensor counters, float scale) -> ()",
    reference=reference.add_row_noise_,
    fake=_fake_add_row_noise,
    dtypes=DTYPES,
    triton="dpkernels.ops.noise.triton_impl:add_row_noise_",
)
