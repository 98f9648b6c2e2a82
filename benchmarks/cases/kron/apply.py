"""Factors applied to M vectors or N matrices, against plain PyTorch.

A full factor of n: 2 M n^2 flops; of rank r: 4 M n r; M n elements are read and written. Both sides
of O x I: 2 N O I (O + I) flops, N O I elements read and written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, poisoned
from dpkernels.ops.kron import Full, LowRank, apply_factor, apply_kron

TAIL = 0.25
RANK = 32


def _symmetric(size: int, device: torch.device, generator: torch.Generator) -> Tensor:
    root = torch.randn(size, size, generator=generator, device=device)
    return root @ root.T / size


def full(rows: int, size: int) -> Case:
    """Return the case: a full factor onto vectors with a bias."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = torch.randn(rows, size, generator=generator, device=device)
        return [x, _symmetric(size + 1, device, generator)]

    def kept(inputs: Inputs) -> tuple[Tensor, ...]:
        return *inputs, poisoned(rows, size + 1, like=inputs[0])

    def ours(x: Tensor, matrix: Tensor, out: Tensor) -> Outputs:
        return [apply_factor(x, Full(matrix), bias=True, out=out)]

    def addend(x: Tensor, matrix: Tensor, out: Tensor) -> Outputs:
        return [torch.addmm(matrix[-1], x, matrix[:-1], out=out)]

    def augmented(x: Tensor, matrix: Tensor) -> Outputs:
        return [torch.cat((x, x.new_ones(rows, 1)), 1) @ matrix]

    return Case(
        op="apply_factor_",
        name=f"apply full factor to {rows} x {size}, bias",
        dtype=torch.float32,
        parameters={"rows": rows, "size": size, "bias": True},
        make_inputs=make_inputs,
        bytes_moved=4 * (2 * rows * size + (size + 1) ** 2),
        flops=2 * rows * (size + 1) ** 2,
        bound="gemm",
        ours=Form("dpkernels", ours, kept),
        plain=(Form("cat, mm", augmented, tuple), Form("addmm, kept", addend, kept)),
        truth=lambda i: augmented(i[0].double(), i[1].double()),
    )


def low_rank(rows: int, size: int) -> Case:
    """Return the case: a low-rank factor onto vectors with a bias."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = torch.randn(rows, size, generator=generator, device=device)
        vectors = torch.randn(size + 1, RANK, generator=generator, device=device)
        values = torch.rand(RANK, generator=generator, device=device)
        return [x, torch.linalg.qr(vectors).Q.contiguous(), values]

    def plain(x: Tensor, vectors: Tensor, values: Tensor) -> Outputs:
        wide = torch.cat((x, x.new_ones(rows, 1)), 1)
        return [TAIL * wide + (wide @ vectors * (values - TAIL)) @ vectors.T]

    def kept(x: Tensor, vectors: Tensor, gains: Tensor, inner: Tensor, out: Tensor) -> Outputs:
        torch.addmm(vectors[-1], x, vectors[:-1], out=inner).mul_(gains)
        torch.mul(x, TAIL, out=out[:, :-1])
        out[:, -1].fill_(TAIL)
        return [out.addmm_(inner, vectors.T)]

    def buffers(inputs: Inputs) -> tuple[Tensor, ...]:
        x, vectors, values = inputs
        outputs = (poisoned(rows, n, like=x) for n in (RANK, size + 1))
        return x, vectors, values - TAIL, *outputs

    def ours(x: Tensor, factor: LowRank, out: Tensor) -> Outputs:
        return [apply_factor(x, factor, bias=True, out=out)]

    return Case(
        op="apply_factor_",
        name=f"apply rank {RANK} to {rows} x {size}, bias",
        dtype=torch.float32,
        parameters={"rows": rows, "size": size, "rank": RANK, "bias": True},
        make_inputs=make_inputs,
        bytes_moved=4 * (2 * rows * size + size * RANK),
        flops=4 * rows * (size + 1) * RANK,
        bound="gemm",
        ours=Form(
            "dpkernels",
            ours,
            lambda i: (i[0], LowRank(i[1], i[2], TAIL), poisoned(rows, size + 1, like=i[0])),
        ),
        plain=(
            Form("cat, mm, mm, add", plain, tuple),
            Form("addmm, mul, addmm, kept", kept, buffers),
        ),
        truth=lambda inputs: plain(*(t.double() for t in inputs)),
    )


def matrices(count: int, rows: int, cols: int) -> Case:
    """Return the case: full factors onto both sides of a batch of matrices."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = torch.randn(count, rows, cols, generator=generator, device=device)
        return [x, *(_symmetric(size, device, generator) for size in (rows, cols))]

    def plain(x: Tensor, left: Tensor, right: Tensor) -> Outputs:
        return [left @ (x @ right)]

    def kept(x: Tensor, left: Tensor, right: Tensor, half: Tensor, out: Tensor) -> Outputs:
        torch.mm(x.flatten(0, 1), right, out=half.flatten(0, 1))
        return [torch.bmm(left.expand(count, rows, rows), half, out=out)]

    def buffers(inputs: Inputs) -> tuple[Tensor, ...]:
        return *inputs, *(poisoned(count, rows, cols, like=inputs[0]) for _ in range(2))

    def ours(x: Tensor, left: Tensor, right: Tensor, _: Tensor, out: Tensor) -> Outputs:
        return [apply_kron(x, Full(left), Full(right), out=out)]

    return Case(
        op="apply_kron_",
        name=f"apply both sides to {count} of {rows} x {cols}",
        dtype=torch.float32,
        parameters={"count": count, "rows": rows, "cols": cols},
        make_inputs=make_inputs,
        bytes_moved=4 * (2 * count * rows * cols + rows * rows + cols * cols),
        flops=2 * count * rows * cols * (rows + cols),
        bound="gemm",
        ours=Form("dpkernels", ours, buffers),
        plain=(
            Form("matmul, matmul", plain, tuple),
            Form("mm, bmm, kept", kept, buffers),
        ),
        truth=lambda inputs: plain(*(t.double() for t in inputs)),
    )
