"""Rows whose sums outgrow a core's cache: cut among the threads, which meet for every group."""

from __future__ import annotations

import pytest
import torch

from dpkernels import use_backend
from dpkernels.ops import clip
from python_tests.ops import clip_cases as cases

OPERATIONS = cases.OPERATIONS

# 285 KiB of float32 sums in all, with an empty tensor, a tiny one and odd ends.
WIDTHS = (40_001, 0, 33_000, 3)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("mode", clip.MODES)
@pytest.mark.parametrize("batch", [1, 6, 9])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_cut_rows_are_clipped_and_added_up(
    cpp: str, threads: int, dtype: torch.dtype, batch: int, mode: clip.Mode, accumulate: bool
) -> None:
    grads = [cases.gradients(batch, width, dtype, seed=i) for i, width in enumerate(WIDTHS)]
    dropped = batch // 2 if batch > 2 else None
    if dropped is not None:
        grads[2][dropped, 7] = float("nan")
    max_norm = [40.0, 1.0, 30.0, 0.5] if mode == "per_layer" else 60.0
    before = [torch.full((width,), 0.25, dtype=cases.sum_dtype(dtype)) for width in WIDTHS]
    out = [b.clone() for b in before]
    result = clip.clip_and_sum(grads, max_norm, mode, out=out, accumulate=accumulate)
    with use_backend("reference"):
        sq_norms = clip.row_sq_norms(grads, per_tensor=mode == "per_layer")
    torch.testing.assert_close(result.sq_norms, sq_norms, rtol=1e-13, atol=0, equal_nan=True)
    factors = clip.clip_factors(result.sq_norms, max_norm, mode, dtype=result.factors.dtype)
    assert torch.equal(factors, result.factors)
    assert result.nonfinite().item() == (dropped is not None)
    for layer, (total, g) in enumerate(zip(out, grads, strict=True)):
        weights = result.factors[layer] if mode == "per_layer" else result.factors
        kept = g.clone()
        if dropped is not None:
            kept[dropped] = 0
        cases.assert_sum(total, kept, weights, before[layer] if accumulate else None)


@pytest.mark.parametrize("batch", [3, 8])
def test_cut_rows_of_a_wider_matrix(cpp: str, threads: int, batch: int) -> None:
    whole = cases.gradients(2 * batch, 70_010, torch.float32)
    view = whole[::2, 3:70_004]
    result = clip.clip_and_sum(view, 100.0)
    cases.assert_sum(result.sum, view, result.factors)
