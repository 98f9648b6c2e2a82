"""Counter-based Gaussian noise: ``x <- scale * (x + std * z)`` in one pass over memory.

``z`` is a pure function of (key, counter, element index): the same on every backend (to the float
tolerance of log, cos and sin), for any number of threads, whatever was drawn before. The stream is
defined in ``reference.py``: Philox 4x32-10 and Box-Muller, with tails to 11.6 sigma. What lies
beyond, at most ``UNREACHABLE_MASS`` of an element's noise, belongs in the statement of a release.

A (key, counter) pair must never be used for two releases: their difference would show the data
without noise. Pass a ``NoiseKey``, which hands out each counter once.

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

__all__ = ["DTYPES", "UNREACHABLE_MASS", "NoiseKey", "add_gaussian_noise_"]

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
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{op}: x must be float32 or float64, got {tensor.dtype}; add the noise to the "
                "float32 sum, then convert"
            )
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise ValueError(
                f"{op}: all of x must share dtype and device, got {tensors[0].dtype} on "
                f"{tensors[0].device} and {tensor.dtype} on {tensor.device}"
            )
    if not tensors:
        return
    check_finite(op, "std", std, at_least=0.0)
    limits = torch.finfo(tensors[0].dtype)
    if std != 0 and not limits.tiny <= std <= limits.max:
        raise ValueError(
            f"{op}: std must be 0 or from {limits.tiny:g} to {limits.max:g} for "
            f"{tensors[0].dtype}, got {std}"
        )
    check_finite(op, "scale", scale)
    check_writable(op, "x", tensors, [])
    key, counter = _key_and_counter(op, key, counter, len(tensors))
    run = backend.select(_add_gaussian_noise, tensors[0].device, tensors[0].dtype)
    run(tensors, std, key, counter, scale)


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
