"""Kronecker preconditioning on GPUs, in Triton.

- Second moments: upper tiles only, mirrored at the end; the 1 of the bias is made in registers, and
  so are the patches of a convolution. Rows are split over programs to fill the GPU; every split
  writes a partial sum, and those are added up in a fixed order, so results are deterministic.
- Low rank: both products in one kernel, x V never leaves the registers; x comes from DRAM once and
  from L2 the second time.
- Full factors are plain products, of one large matrix or a batch: cuBLAS and rocBLAS do those, with
  the bias as an addend, and there is nothing to fuse with them.

No GPU was at hand: nothing here was timed. Tiles follow from the static report (``make
gpu-check``): no spills on any target.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.kron import reference
from dpkernels.ops.kron.reference import sum_dtype
from dpkernels.ops.kron.triton_kernels import conv_moment_kernel, low_rank_kernel, moment_kernel

# Without tensor cores (float32 in full precision, float64) a thread holds its share of both
# operands for all of DEPTH in registers: 4 x 4 sums and 8 x 16 operands of float32 here, half of
# that of float64, which takes twice the registers. The addresses of patches take more: 64 columns
# spill there on every target (static report).
_BLOCK = {torch.float32: 64, torch.float64: 32}
_PATCH_BLOCK = 32
_DEPTH = 16
_WARPS = 8
_LOW_RANK_ROWS = 32
_LOW_RANK_COLUMNS = 16
# Ranks are rounded up to these. More would not stay in registers: they are two products of the
# library, as a full factor is one.
_RANKS = {torch.float32: (16, 32), torch.float64: (16,)}
# Rows of a split, at least. Its partial sum is written and read again, 8 bytes an element: at about
# 20 float32 operations a byte (H100) that is the time of 80 rows.
_ROWS_PER_SPLIT = 512
# Without a GPU (interpreter): small, so that tests see rows split.
_INTERPRETED_SMS = 8
_INTERPRETED_ROWS_PER_SPLIT = 32


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _multipliable(x: Tensor) -> Tensor:
    """Return ``x`` as a kernel can multiply it: the interpreter takes bfloat16 for its bits."""
    return x if x.is_cuda or x.dtype != torch.bfloat16 else x.float()


def _splits(x: Tensor, rows: int, upper_tiles: int) -> tuple[int, int]:
    """Return into how many ranges the rows are split, and the rows of one."""
    least = _ROWS_PER_SPLIT if x.is_cuda else _INTERPRETED_ROWS_PER_SPLIT
    # Two programs for each SM, so that one computes while the other loads.
    wanted = triton.cdiv(2 * _multiprocessors(x.device), upper_tiles)
    splits = max(1, min(wanted, rows // least))
    rows_per_split = triton.cdiv(triton.cdiv(rows, splits), _DEPTH) * _DEPTH
    return triton.cdiv(rows, rows_per_split), rows_per_split


def _mirrored(partials: Tensor, scale: float) -> Tensor:
    """Return ``scale`` times the sum of upper triangles, both triangles of it.

    Nobody wrote below the diagonal's tiles; and a sum over splits rounds the two triangles apart.
    """
    total = partials.sum(0).mul_(scale)
    return total.triu() + total.triu(1).mT


def second_moment(x: Tensor, bias: bool, scale: float) -> Tensor:
    """``scale * sum_r [x_r, 1][x_r, 1]^T`` over the rows of x ``[B, T, n]``: ``[n, n]``."""
    rows = _multipliable(x.reshape(x.shape[0] * x.shape[1], x.shape[2]))
    count, size = rows.shape
    n, dtype = size + bias, sum_dtype(x.dtype)
    if count * n == 0:
        return x.new_zeros((n, n), dtype=dtype)
    tiles = triton.cdiv(n, _BLOCK[dtype])
    splits, rows_per_split = _splits(x, count, tiles * (tiles + 1) // 2)
    partials = x.new_empty((splits, n, n), dtype=dtype)
    with torch.cuda.device_of(x):
        moment_kernel[(tiles, tiles, splits)](
            rows,
            partials,
            count,
            size,
            rows.stride(0),
            rows.stride(1),
            rows_per_split,
            BIAS=bias,
            BLOCK=_BLOCK[dtype],
            DEPTH=_DEPTH,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return _mirrored(partials, scale)


def conv_second_moment(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: bool,
    scale: float,
) -> Tensor:
    """``scale * sum_r [p_r, 1][p_r, 1]^T`` over the patches of each group: ``[groups, n, n]``."""
    x = _multipliable(x.contiguous())
    axes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    missing = [(1, 1, 1, 0, 1)] * (5 - x.dim())
    columns = list(zip(*missing, *axes, strict=True)) if missing else list(zip(*axes, strict=True))
    sizes, kernels, strides, paddings, dilations = (list(column) for column in columns)
    outs = [
        max(0, (s + 2 * p - d * (k - 1) - 1) // step + 1)
        for s, k, step, p, d in zip(sizes, kernels, strides, paddings, dilations, strict=True)
    ]
    group_channels = x.shape[1] // groups
    count, size = x.shape[0], group_channels
    for out, taps in zip(outs, kernels, strict=True):
        count, size = count * out, size * taps
    n, dtype = size + bias, sum_dtype(x.dtype)
    if count * n == 0:
        return x.new_zeros((groups, n, n), dtype=dtype)
    tiles = triton.cdiv(n, _PATCH_BLOCK)
    splits, rows_per_split = _splits(x, count, groups * tiles * (tiles + 1) // 2)
    partials = x.new_empty((splits, groups, n, n), dtype=dtype)
    head = [x.shape[1], group_channels, x.shape[0]]
    geometry = [*head, *sizes, *kernels, *strides, *paddings, *dilations, *outs]
    with torch.cuda.device_of(x):
        conv_moment_kernel[(tiles, tiles, groups * splits)](
            x,
            partials,
            torch.tensor(geometry, dtype=torch.int64).to(x.device),
            count,
            size,
            rows_per_split,
            splits,
            BIAS=bias,
            BLOCK=_PATCH_BLOCK,
            DEPTH=_DEPTH,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return _mirrored(partials, scale)


def apply_factor_(out: Tensor, x: Tensor, factor: list[Tensor], tail: float, bias: bool) -> None:
    """``out = x U``, or ``[x, 1] U`` with ``bias``, for the rows of x ``[M, n]``."""
    padded = None
    if len(factor) == 2 and factor[0].shape[1] > 0:
        rank = factor[0].shape[1]
        padded = next((r for r in _RANKS[out.dtype] if rank <= r), None)
    if padded is None:
        return reference.apply_factor_(out, x, factor, tail, bias)
    vectors = factor[0].contiguous()
    with torch.cuda.device_of(x):
        low_rank_kernel[(triton.cdiv(x.shape[0], _LOW_RANK_ROWS),)](
            out,
            x,
            vectors,
            (factor[1] - tail).contiguous(),
            tail,
            *x.shape,
            *x.stride(),
            vectors.shape[1],
            BIAS=bias,
            RANK=padded,
            BLOCK_M=_LOW_RANK_ROWS,
            BLOCK_N=_LOW_RANK_COLUMNS,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )
    return None


def apply_kron_(
    out: Tensor,
    x: Tensor,
    left: list[Tensor],
    left_tail: float,
    right: list[Tensor],
    right_tail: float,
) -> None:
    """``out = U_G X U_A`` for the matrices of x ``[N, O, I]``."""
    if len(right) != 2:
        return reference.apply_kron_(out, x, left, left_tail, right, right_tail)
    columns = x.shape[2]
    half = torch.empty_like(out) if left else out
    rows = x.reshape(-1, columns)
    apply_factor_(half.view(-1, columns), rows, right, right_tail, False)
    if left:
        reference.apply_kron_(out, half, left, left_tail, [], 1.0)
    return None


_TRITON_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the functions above launch their kernels."""
    return [
        case
        for dtype in _TRITON_NAMES
        for bias in (False, True)
        for case in (*_moment_cases(dtype, bias), *_low_rank_cases(dtype, bias))
    ]


def _moment_cases(dtype: torch.dtype, bias: bool) -> list[AheadOfTimeCase]:
    total = sum_dtype(dtype)
    pointers = {"x": f"*{_TRITON_NAMES[dtype]}", "partials": f"*{_TRITON_NAMES[total]}"}
    sizes = dict.fromkeys(("rows", "size", "rows_per_split"), "i64")
    strides = dict.fromkeys(("row_stride", "col_stride"), "i64")
    patches = {"geometry": "*i64", "splits": "i32"}
    return [
        AheadOfTimeCase(
            kernel=kernel,
            configuration=f"{_TRITON_NAMES[dtype]} {block}{' bias' if bias else ''}",
            signature={**pointers, **sizes, **more},
            constexprs={"BIAS": bias, "BLOCK": block, "DEPTH": _DEPTH},
            num_warps=_WARPS,
            bytes_per_element=dtype.itemsize,
            aligned=("x",),
        )
        for kernel, block, more in (
            (moment_kernel, _BLOCK[total], strides),
            (conv_moment_kernel, _PATCH_BLOCK, patches),
        )
    ]


def _low_rank_cases(dtype: torch.dtype, bias: bool) -> list[AheadOfTimeCase]:
    total = _TRITON_NAMES[sum_dtype(dtype)]
    pointers = {"x": f"*{_TRITON_NAMES[dtype]}"}
    pointers |= dict.fromkeys(("out", "vectors", "gains"), f"*{total}")
    sizes = dict.fromkeys(("rows", "size", "row_stride", "col_stride", "rank"), "i64")
    blocks = {"BLOCK_M": _LOW_RANK_ROWS, "BLOCK_N": _LOW_RANK_COLUMNS}
    return [
        AheadOfTimeCase(
            kernel=low_rank_kernel,
            configuration=f"{_TRITON_NAMES[dtype]} rank {rank}{' bias' if bias else ''}",
            signature={**pointers, "tail": "fp64", **sizes},
            constexprs={"BIAS": bias, "RANK": rank, **blocks},
            num_warps=_WARPS,
            bytes_per_element=dtype.itemsize + sum_dtype(dtype).itemsize,
            aligned=("x", "out", "vectors"),
        )
        for rank in _RANKS[sum_dtype(dtype)]
    ]
