"""Per-sample gradients of an elementwise scale and shift on GPUs, in Triton.

A program takes some channels of one sample and walks along its positions, reading both inputs once
and adding up in float64. Channels first or last is a matter of strides.

No GPU was at hand: nothing here was timed. 32 x 32 elements are 16 KB of float32 in flight for each
program of four warps; the static report (``make gpu-check``) shows no spills.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.ghost.layer import sum_dtype

_CHANNELS = 32
_POSITIONS = 32
_WARPS = 4


@triton.jit(do_not_specialize=["positions", "width"])
def scale_shift_kernel(
    x,
    d,
    weight_scale,
    bias_scale,
    weight_grads,
    bias_grads,
    positions: tl.int64,
    width: tl.int64,
    CHANNELS_FIRST: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHT_SCALED: tl.constexpr,
    BIAS_SCALED: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over positions of x d and of d, for CHANNELS channels of one sample."""
    blocks = tl.cdiv(width, CHANNELS)
    program = tl.program_id(0).to(tl.int64)
    sample = program // blocks
    channel = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    products = tl.zeros([POSITIONS, CHANNELS], tl.float64)
    sums = tl.zeros([POSITIONS, CHANNELS], tl.float64)
    for start in range(0, positions, POSITIONS):
        position = start + tl.arange(0, POSITIONS).to(tl.int64)
        inside = (position < positions)[:, None] & (channel < width)[None, :]
        if CHANNELS_FIRST:
            at = channel[None, :] * positions + position[:, None]
        else:
            at = position[:, None] * width + channel[None, :]
        at += sample * positions * width
        errors = tl.load(d + at, mask=inside, other=0.0).to(tl.float64)
        products += tl.load(x + at, mask=inside, other=0.0).to(tl.float64) * errors
        sums += errors
    out = sample * width + channel
    weight = tl.sum(products, 0)
    if WEIGHT_SCALED:
        weight *= tl.load(weight_scale + channel, mask=channel < width, other=0.0)
    dtype: tl.constexpr = weight_grads.dtype.element_ty
    tl.store(weight_grads + out, weight.to(dtype), mask=channel < width)
    if BIAS:
        bias = tl.sum(sums, 0)
        if BIAS_SCALED:
            bias *= tl.load(bias_scale + channel, mask=channel < width, other=0.0)
        tl.store(bias_grads + out, bias.to(dtype), mask=channel < width)


def scale_shift_grads(
    normalised: Tensor,
    errors: Tensor,
    channels_first: bool,
    bias: bool,
    weight_scale: Tensor | None,
    bias_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``reference_scale_shift.scale_shift_grads``."""
    x, d = normalised.contiguous(), errors.contiguous()
    batch = x.shape[0]
    positions, width = (x.shape[2], x.shape[1]) if channels_first else x.shape[1:]
    dtype = sum_dtype(x.dtype)
    weight_grads = x.new_empty((batch, width), dtype=dtype)
    bias_grads = x.new_empty((batch, width if bias else 0), dtype=dtype)
    if weight_grads.numel() == 0:
        return weight_grads, bias_grads
    with torch.cuda.device_of(x):
        scale_shift_kernel[(batch * triton.cdiv(width, _CHANNELS),)](
            x,
            d,
            weight_grads if weight_scale is None else weight_scale,
            weight_grads if bias_scale is None else bias_scale,
            weight_grads,
            bias_grads,
            positions,
            width,
            CHANNELS_FIRST=channels_first,
            BIAS=bias,
            WEIGHT_SCALED=weight_scale is not None,
            BIAS_SCALED=bias_scale is not None,
            POSITIONS=_POSITIONS,
            CHANNELS=_CHANNELS,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return weight_grads, bias_grads


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return the configurations in which the kernel is launched: with and without everything."""
    cases = []
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp64", 8)):
        sums = "fp64" if dtype == "fp64" else "fp32"
        for first in (0, 1):
            for full in (0, 1):
                scale = "*fp64" if full else f"*{sums}"
                pointers = {"x": f"*{dtype}", "d": f"*{dtype}"}
                pointers |= dict.fromkeys(("weight_scale", "bias_scale"), scale)
                pointers |= dict.fromkeys(("weight_grads", "bias_grads"), f"*{sums}")
                flags = dict.fromkeys(("BIAS", "WEIGHT_SCALED", "BIAS_SCALED"), full)
                tile = {"POSITIONS": _POSITIONS, "CHANNELS": _CHANNELS}
                cases.append(
                    AheadOfTimeCase(
                        kernel=scale_shift_kernel,
                        configuration=f"{dtype} channels {'first' if first else 'last'}"
                        + " bias scaled" * full,
                        signature={**pointers, "positions": "i64", "width": "i64"},
                        constexprs={"CHANNELS_FIRST": first, **flags, **tile},
                        num_warps=_WARPS,
                        bytes_per_element=2 * size,
                    )
                )
    return cases
