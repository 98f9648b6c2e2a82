"""``clip``: norms, factors and clipped sums of materialised per-sample gradients.

B samples of D elements, of ``size`` bytes each (all tensors together):

====================  ========  =======  ================================================
operation             bytes     flops    of the bytes
====================  ========  =======  ================================================
``clip_and_sum``      B D size  4 B D    gradients read once; the sums, at most 1/64 of
                                         that, are not counted
``row_sq_norms``      B D size  2 B D    the same
``weighted_row_sum``  B D size  2 B D    the same
``clip_factors``      12 B      4 B      float64 in, float32 out
``layer_factors``     8 L B     L B      L rows of float64 in; and 4 B out, 4 B flops
====================  ========  =======  ================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.cases.clip.data import Factors, gradients, row_squares, weighted_rows
from benchmarks.cases.clip.half import half_forms
from benchmarks.cases.clip.parts import part_cases
from benchmarks.cases.clip.several import list_forms, per_layer_forms
from benchmarks.cases.clip.single import single_forms
from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.clip import Mode, clip_and_sum

GAMMA = 0.01

# Weights and biases of three convolutions and three linear layers each, tiny biases included.
MODEL_200K = (432, 16, 4_608, 32, 18_432, 64, 163_840, 160, 10_240, 64, 2_048, 32)
MODEL_20K = (72, 8, 1_152, 16, 4_608, 32, 11_520, 40, 1_920, 48, 480, 10)
MODEL_1K = (36, 4, 216, 6, 384, 16, 160, 10, 80, 8, 48, 6)

USUAL = "vector_norm, c @ g"


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the sizes of the claim, a model's tensors, half precision, modes, and the parts."""
    if quick:
        yield _case(256, (20_000,))
        yield _case(4096, (1_000,))
        yield _case(256, MODEL_20K)
        yield from part_cases(256, 20_000)
        return
    yield _case(256, (200_000,), target=Target(1.6, USUAL, percent_of_bound=65.0))
    yield _case(1024, (20_000,), target=Target(1.9, USUAL))
    yield _case(4096, (1_000,), target=Target(2.5, USUAL))
    yield _case(64, (1_000_000,))
    yield _case(256, MODEL_200K, target=Target(2.0))
    yield _case(1024, MODEL_20K, target=Target(2.0))
    yield _case(4096, MODEL_1K, target=Target(2.0))
    yield _case(256, (200_000,), dtype=torch.bfloat16)
    yield _case(256, MODEL_200K, dtype=torch.bfloat16)
    yield _case(256, MODEL_200K, mode="automatic")
    yield _case(256, MODEL_200K, mode="per_layer")
    yield from part_cases(256, 200_000)


def _case(
    batch: int,
    sizes: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    mode: Mode = "flat",
    target: Target | None = None,
) -> Case:
    elements = batch * sum(sizes)
    # The median row has about this norm, so that half of the rows are clipped.
    bounds = [math.sqrt(size) for size in sizes]
    max_norm = bounds if mode == "per_layer" else math.sqrt(sum(sizes))
    factors = [_factors(bound, mode) for bound in bounds]
    over_all = _factors(math.sqrt(sum(sizes)), mode)
    if mode == "per_layer":
        plain = per_layer_forms(factors)
    elif dtype != torch.float32:
        plain = half_forms(over_all)
    else:
        plain = single_forms(over_all) if len(sizes) == 1 else list_forms(over_all)
    tensors = f" in {len(sizes)} tensors" if len(sizes) > 1 else ""
    variant = [] if dtype == torch.float32 else [str(dtype).removeprefix("torch.")]
    variant += [] if mode == "flat" else [mode]
    return Case(
        op="clip_and_sum_",
        name=" ".join([f"clip_and_sum {batch} x {sum(sizes):,}{tensors}", *variant]),
        dtype=dtype,
        parameters={"batch": batch, "sizes": list(sizes), "mode": mode},
        make_inputs=lambda device, generator: gradients(batch, sizes, dtype, device, generator),
        bytes_moved=elements * dtype.itemsize,
        flops=4 * elements,
        bound="read",
        ours=_ours(max_norm, mode),
        plain=plain,
        truth=lambda inputs: _truth(inputs, factors if mode == "per_layer" else [over_all]),
        target=target or Target(),
    )


def _factors(bound: float, mode: Mode) -> Factors:
    if mode == "automatic":
        return lambda norms: bound / (norms + GAMMA)
    return lambda norms: (bound / norms).clamp(max=1.0)


def _ours(max_norm: float | list[float], mode: Mode) -> Form:
    def run(grads: Tensor | list[Tensor], out: Tensor | list[Tensor]) -> Outputs:
        total = clip_and_sum(grads, max_norm, mode, gamma=GAMMA, out=out).sum
        return [total] if isinstance(total, Tensor) else total

    def arguments(inputs: Inputs) -> tuple[Tensor | list[Tensor], Tensor | list[Tensor]]:
        outs = [poisoned(g.shape[1], like=g) for g in inputs]
        return (inputs[0], outs[0]) if len(inputs) == 1 else (inputs, outs)

    return Form("dpkernels", run, arguments)


def _truth(inputs: Inputs, factors: list[Factors]) -> Outputs:
    """Sum row by row in float64, so that no float64 copy of the gradients is needed."""
    squares = torch.stack([row_squares(g) for g in inputs])
    norms = (squares if len(factors) > 1 else squares.sum(0, keepdim=True)).sqrt()
    weights = [f(n) for f, n in zip(factors, norms, strict=True)]
    shared = weights if len(weights) > 1 else weights * len(inputs)
    return [weighted_rows(g, c) for g, c in zip(inputs, shared, strict=True)]
