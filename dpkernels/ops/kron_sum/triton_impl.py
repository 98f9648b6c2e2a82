"""``sum_i G_i X A_i`` on GPUs, in Triton: two launches for all layers and clients.

Both steps are sums of products, C = sum_s A_s (B_s - S_s):

1. H_i = G_i (X - W_i) for every layer and client: one term each, the center subtracted on the way
   into shared memory.
2. out = sum_i H_i A_i for every layer: n terms, added up in registers.

A layer of a small model has a few tiles only, so one launch takes the tiles of all of them: a table
in device memory says where each product's operands are. No GPU was at hand: nothing here was timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase

# Tiles of 32 x 32: LeNet's largest layer has 36 of them, a hundred SMs want no fewer. A thread
# holds its share of both operands for all of DEPTH in registers: depth 32 on 4 warps spills on
# sm_80 to sm_100 (static report).
_BLOCK = 32
_DEPTH = 16
_WARPS = 8
# Numbers of a row of the table.
_FIELDS = tl.constexpr(12)


@triton.jit
def _tile(base, row, col, rows, cols, stride):
    """Return the addresses of a tile of a row-major matrix and which of them are inside."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return base + row[:, None] * stride + col[None, :], inside


@triton.jit(do_not_specialize=["products"])
def grouped_sums_kernel(
    table,
    anchor,
    products: tl.int32,
    CENTERED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of ``C (+)= sum_s A_s (B_s - S_s)`` of one of several products.

    A row of the table: first tile, addresses of A, B, S (if CENTERED) and C, rows, columns and
    depth of a term, number of terms, and how far apart the terms of A, B and S are, in elements.
    """
    dtype: tl.constexpr = anchor.dtype.element_ty
    pointer: tl.constexpr = tl.pointer_type(dtype)
    program = tl.program_id(0).to(tl.int64)
    product = 0
    while product + 1 < products and tl.load(table + (product + 1) * _FIELDS) <= program:
        product += 1
    entry = table + product * _FIELDS
    a = tl.load(entry + 1).to(pointer)
    b = tl.load(entry + 2).to(pointer)
    center = tl.load(entry + 3).to(pointer)
    c = tl.load(entry + 4).to(pointer)
    rows, cols, depth = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    terms, a_step, b_step = tl.load(entry + 8), tl.load(entry + 9), tl.load(entry + 10)
    center_step = tl.load(entry + 11)
    tile = program - tl.load(entry)
    tiles_across = tl.cdiv(cols, BLOCK)
    row = (tile // tiles_across) * BLOCK + tl.arange(0, BLOCK)
    col = (tile % tiles_across) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], dtype)
    for term in range(terms):
        for start in range(0, depth, DEPTH):
            k = start + tl.arange(0, DEPTH).to(tl.int64)
            at, inside = _tile(a + term * a_step, row, k, rows, depth, depth)
            left = tl.load(at, mask=inside, other=0.0)
            at, inside = _tile(b + term * b_step, k, col, depth, cols, cols)
            right = tl.load(at, mask=inside, other=0.0)
            if CENTERED:
                at, inside = _tile(center + term * center_step, k, col, depth, cols, cols)
                right -= tl.load(at, mask=inside, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=dtype)
    at, inside = _tile(c, row, col, rows, cols, cols)
    if ACCUMULATE:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


@dataclass(frozen=True)
class _Product:
    """One product of the table: ``c (+)= sum_s a_s (b_s - center_s)``.

    Steps are from one term to the next, in elements.
    """

    a: Tensor
    b: Tensor
    center: Tensor | None
    c: Tensor
    depth: int
    terms: int
    steps: tuple[int, int, int]

    def tiles(self) -> int:
        """Return how many programs it takes."""
        rows, cols = self.c.shape
        return -(-rows // _BLOCK) * -(-cols // _BLOCK)

    def fields(self, first_tile: int) -> list[int]:
        """Return its row of the table."""
        center = 0 if self.center is None else self.center.data_ptr()
        addresses = [self.a.data_ptr(), self.b.data_ptr(), center, self.c.data_ptr()]
        return [first_tile, *addresses, *self.c.shape, self.depth, self.terms, *self.steps]


def _launch(products: list[_Product], accumulate: bool) -> None:
    products = [product for product in products if product.tiles()]
    rows, tiles = [], 0
    for product in products:
        rows.append(product.fields(tiles))
        tiles += product.tiles()
    if not tiles:
        return
    anchor = products[0].c
    table = torch.tensor(rows, dtype=torch.int64).to(anchor.device)
    with torch.cuda.device_of(anchor):
        grouped_sums_kernel[(tiles,)](
            table,
            anchor,
            len(products),
            CENTERED=products[0].center is not None,
            ACCUMULATE=accumulate,
            BLOCK=_BLOCK,
            DEPTH=_DEPTH,
            num_warps=_WARPS,
            **COMPILE_OPTIONS,
        )


def kron_sum_(
    out: list[Tensor],
    gs: list[Tensor],
    as_: list[Tensor],
    xs: list[Tensor],
    centers: list[Tensor],
    accumulate: bool,
) -> None:
    """``out[l] (+)= sum_i gs[l][i] (xs[l] - centers[l][i]) as_[l][i]``; no centers are zero."""
    gs, as_, xs, centers = ([t.contiguous() for t in ts] for ts in (gs, as_, xs, centers))
    halves = [g.new_empty((g.shape[0], *x.shape)) for g, x in zip(gs, xs, strict=True)]
    first = [
        _Product(g[i], x, centers[layer][i] if centers else None, half[i], len(x), 1, (0, 0, 0))
        for layer, (g, x, half) in enumerate(zip(gs, xs, halves, strict=True))
        for i in range(len(g))
    ]
    _launch(first, accumulate=False)
    second = [
        _Product(
            half, a, None, target, a.shape[2], len(a), (target.numel(), a.shape[1] * a.shape[2], 0)
        )
        for half, a, target in zip(halves, as_, out, strict=True)
    ]
    _launch(second, accumulate)


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which ``kron_sum_`` launches its kernel."""
    modes = {"": (False, False), " centered": (True, False), " accumulate": (False, True)}
    return [
        AheadOfTimeCase(
            kernel=grouped_sums_kernel,
            configuration=f"{name} {_BLOCK}x{_BLOCK}{mode}",
            signature={"table": "*i64", "anchor": f"*{name}", "products": "i32"},
            constexprs={
                "CENTERED": centered,
                "ACCUMULATE": accumulate,
                "BLOCK": _BLOCK,
                "DEPTH": _DEPTH,
            },
            num_warps=_WARPS,
            bytes_per_element=size,
            aligned=("table", "anchor"),
        )
        for name, size in (("fp32", 4), ("fp64", 8))
        for mode, (centered, accumulate) in modes.items()
    ]
