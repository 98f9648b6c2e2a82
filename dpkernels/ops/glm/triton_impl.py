"""Softmax-regression records on GPUs, in Triton; the linear solves are those of ``torch.linalg``.

One kernel takes the records to probabilities, norms, factors and weights; a second one makes the
tiles of the Hessians from them, each tile once and stored to its (up to four) mirror images. So a
Hessian is written once and nothing but 12 N C bytes of tables (float32) is stored beside it.

Logits and probabilities are float64, which costs 2 N C d float64 flops: for ten classes of 64
features less than a hundredth of the Hessian's products. Those are IEEE float32 (or float64): TF32
would round what has been clipped by more than 1e-6.

No GPU was at hand: nothing here was timed. Tile sizes follow from the static report
(``make gpu-check``): no spills on any target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase
from dpkernels.ops.clip import triton_impl as clip
from dpkernels.ops.glm import reference
from dpkernels.ops.glm.triton_kernels import gradient_kernel, gram_kernel, records_kernel

# Classes that a program of the record kernel can hold; every width costs a compilation. The product
# of records, classes and features that it multiplies at a time is 4096: 32 float64 a thread.
_CLASS_WIDTHS = (16, 64, 256)
_RECORD_CELLS = 4096
_RECORD_FEATURES = 16
_WARPS = 4
# Tiles of the products: the smallest that tl.dot takes in every direction times two, so that the
# float64 ones do not spill.
_DEPTH = 16
_TILE = 32
_CLASS_TILE = 16


class _Weights(NamedTuple):
    """What ``records_kernel`` writes: norms ``[N]``, and tables ``[N, C]`` that may be empty."""

    gradient_sq_norms: Tensor
    hessian_sq_norms: Tensor
    residuals: Tensor
    p: Tensor
    q: Tensor
    hessian_factors: Tensor


def _with_columns_adjacent(x: Tensor) -> Tensor:
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _tables(
    x: Tensor,
    labels: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    bounds: tuple[float, float] = (1.0, 1.0),
    gradients: bool = False,
    hessians: bool = False,
) -> _Weights:
    """Run ``records_kernel`` over all clients; ``gradients`` and ``hessians`` say what to write."""
    count, classes = x.shape[0], theta.shape[1]
    theta = theta.contiguous()
    of_gradients = (count, classes) if gradients else (0, classes)
    of_hessians = (count, classes) if hessians else (0, classes)
    weights = _Weights(
        x.new_zeros(count, dtype=torch.float64),
        x.new_zeros(count, dtype=torch.float64),
        x.new_empty(of_gradients),
        x.new_empty(of_hessians),
        x.new_empty(of_hessians),
        x.new_empty(of_hessians[0]),
    )
    width = next(width for width in _CLASS_WIDTHS if classes <= width)
    rows = _RECORD_CELLS // _RECORD_FEATURES // width
    blocks = triton.cdiv(most, rows)
    if blocks and spans.shape[0]:
        with torch.cuda.device_of(x):
            records_kernel[(blocks * spans.shape[0],)](
                x,
                labels.contiguous(),
                spans.contiguous(),
                theta,
                *weights,
                x.stride(0),
                theta.stride(0) if theta.shape[0] > 1 else 0,
                x.shape[1],
                classes,
                blocks,
                *bounds,
                GRADIENTS=gradients,
                HESSIANS=hessians,
                **_record_blocks(width),
                **_launch(),
            )
    return weights


def _launch() -> dict[str, Any]:
    return {"num_warps": _WARPS, **COMPILE_OPTIONS}


def _record_blocks(width: int) -> dict[str, int]:
    rows = _RECORD_CELLS // _RECORD_FEATURES // width
    return {"BLOCK_B": rows, "BLOCK_C": width, "BLOCK_D": _RECORD_FEATURES}


def _gram(x: Tensor, spans: Tensor, factors: Tensor, p: Tensor | None, q: Tensor | None) -> Tensor:
    """Return Hessians ``[clients, C d, C d]``, or covariances ``[clients, d, d]`` without p, q."""
    width = x.shape[1] * (1 if p is None else p.shape[1])
    sums = x.new_empty(spans.shape[0], width, width)
    _write_gram(sums, x, spans, factors, p, q)
    return sums


def _write_gram(
    sums: Tensor, x: Tensor, spans: Tensor, factors: Tensor, p: Tensor | None, q: Tensor | None
) -> None:
    features = x.shape[1]
    classes = 1 if p is None else p.shape[1]
    tiles = triton.cdiv(features, _TILE)
    programs = spans.shape[0] * classes**2 * tiles**2
    if programs:
        with torch.cuda.device_of(x):
            gram_kernel[(programs,)](
                x,
                spans.contiguous(),
                factors if p is None else p,
                factors if q is None else q,
                factors,
                sums,
                x.stride(0),
                features,
                classes,
                COVARIANCE=p is None,
                BLOCK_K=_DEPTH,
                BLOCK_D=_TILE,
                **_launch(),
            )


def _write_gradients(gradients: Tensor, x: Tensor, spans: Tensor, residuals: Tensor) -> None:
    features, classes = x.shape[1], residuals.shape[1]
    programs = spans.shape[0] * triton.cdiv(classes, _CLASS_TILE) * triton.cdiv(features, _TILE)
    if programs:
        with torch.cuda.device_of(x):
            gradient_kernel[(programs,)](
                x,
                spans.contiguous(),
                residuals,
                gradients,
                x.stride(0),
                features,
                classes,
                BLOCK_K=_DEPTH,
                BLOCK_C=_CLASS_TILE,
                BLOCK_D=_TILE,
                **_launch(),
            )


def glm_record_norms(
    x: Tensor, labels: Tensor, spans: Tensor, most: int, theta: Tensor
) -> tuple[Tensor, Tensor]:
    """Squared norms of every record's gradient and Hessian, float64 ``[N]``."""
    if theta.shape[1] > _CLASS_WIDTHS[-1]:
        return reference.glm_record_norms(x, labels, spans, most, theta)
    weights = _tables(_with_columns_adjacent(x), labels, spans, most, theta)
    return weights.gradient_sq_norms, weights.hessian_sq_norms


def glm_clipped_sums_(
    gradients: Tensor | None,
    hessians: Tensor | None,
    x: Tensor,
    labels: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    gradient_bound: float,
    hessian_bound: float,
) -> tuple[Tensor, Tensor]:
    """Write clipped sums of gradients and Hessians; return the squared norms of what is summed."""
    shared, bounds = (x, labels, spans, most, theta), (gradient_bound, hessian_bound)
    if theta.shape[1] > _CLASS_WIDTHS[-1]:
        return reference.glm_clipped_sums_(gradients, hessians, *shared, *bounds)
    x = _with_columns_adjacent(x)
    wanted = gradients is not None, hessians is not None
    weights = _tables(x, labels, spans, most, theta, bounds, *wanted)
    if gradients is not None:
        _write_gradients(gradients, x, spans, weights.residuals)
    if hessians is not None:
        _write_gram(hessians, x, spans, weights.hessian_factors, weights.p, weights.q)
    nothing = x.new_empty(0, dtype=torch.float64)
    return (
        nothing if gradients is None else weights.gradient_sq_norms,
        nothing.clone() if hessians is None else weights.hessian_sq_norms,
    )


def glm_feature_covariance(
    x: Tensor, spans: Tensor, most: int, bound: float
) -> tuple[Tensor, Tensor]:
    """``sum_i min(1, bound / |x_i|^2) x_i x_i^T``, ``[clients, d, d]``, and ``|x|^4``, ``[N]``."""
    x = _with_columns_adjacent(x)
    sq_norms = clip.row_sq_norms([x], False).square()
    factors = clip.clip_factors(sq_norms.unsqueeze(0), [bound], False, 0.0, x.dtype)[0]
    ends = torch.zeros(x.shape[0] + 1, dtype=torch.int64, device=x.device)
    ones = torch.ones_like(spans[:, 0])
    ends.scatter_add_(0, spans[:, 0], ones).scatter_add_(0, spans[:, 1], -ones)
    of_a_client = ends.cumsum(0)[:-1] > 0
    return _gram(x, spans, factors, None, None), torch.where(of_a_client, sq_norms, 0.0)


def glm_newton(
    x: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    hessian_bound: float,
    v: Tensor,
    gammas: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(H + gamma I)^-1 v`` with H = the clipped Hessian sums, a group of clients at a time."""
    if theta.shape[1] > _CLASS_WIDTHS[-1]:
        return reference.glm_newton(x, spans, most, theta, hessian_bound, v, gammas)
    x = _with_columns_adjacent(x)
    # The Hessian does not depend on the labels.
    labels = spans.new_zeros(x.shape[0])
    table = _tables(x, labels, spans, most, theta, (1.0, hessian_bound), hessians=True)
    clients, width = v.shape[0], theta.shape[1] * theta.shape[2]
    size = reference.groups(clients, width, x.element_size())
    solutions, failed = torch.empty_like(v), spans.new_empty(clients)
    for first in range(0, clients, size):
        part = slice(first, min(first + size, clients))
        hessians = _gram(x, spans[part], table.hessian_factors, table.p, table.q)
        y, failed[part] = reference.glm_solve(hessians, v[part].reshape(-1, width), gammas[part])
        solutions[part] = y.reshape(v[part].shape)
    return solutions, failed, table.hessian_sq_norms


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the functions above launch their kernels."""
    cases = []
    for name, size in (("fp32", 4), ("fp64", 8)):
        cases += _record_cases(name, size)
        table = dict.fromkeys(("x", "probabilities", "complements", "factors", "sums"), f"*{name}")
        shape = dict.fromkeys(("row_stride", "features", "classes"), "i64")
        cases += [
            AheadOfTimeCase(
                kernel=gram_kernel,
                configuration=f"{name} {'covariance' if covariance else 'Hessian'}",
                signature={**table, "spans": "*i64", **shape},
                constexprs={"COVARIANCE": covariance, "BLOCK_K": _DEPTH, "BLOCK_D": _TILE},
                num_warps=_WARPS,
                bytes_per_element=size,
            )
            for covariance in (False, True)
        ]
        pointers = dict.fromkeys(("x", "residuals", "gradients"), f"*{name}")
        blocks = {"BLOCK_K": _DEPTH, "BLOCK_C": _CLASS_TILE, "BLOCK_D": _TILE}
        cases.append(
            AheadOfTimeCase(
                kernel=gradient_kernel,
                configuration=name,
                signature={**pointers, "spans": "*i64", **shape},
                constexprs=blocks,
                num_warps=_WARPS,
                bytes_per_element=size,
            )
        )
    return cases


def _record_cases(name: str, size: int) -> list[AheadOfTimeCase]:
    tables = ("residuals", "probabilities", "complements", "hessian_factors")
    signature = dict.fromkeys(("x", "theta", *tables), f"*{name}")
    signature |= dict.fromkeys(("labels", "spans"), "*i64")
    signature |= dict.fromkeys(("gradient_sq_norms", "hessian_sq_norms"), "*fp64")
    sizes = ("row_stride", "theta_stride", "features", "classes", "blocks")
    signature |= dict.fromkeys(sizes, "i64")
    signature |= dict.fromkeys(("gradient_bound", "hessian_bound"), "fp64")
    # Norms alone; one sum or the other; both; Hessians for a Newton step are the second again.
    outputs = [(False, False), (True, False), (False, True), (True, True)]
    return [
        AheadOfTimeCase(
            kernel=records_kernel,
            configuration=f"{name} {width} classes"
            + (" gradients" if gradients else "")
            + (" Hessians" if hessians else ""),
            signature=signature,
            constexprs={"GRADIENTS": gradients, "HESSIANS": hessians, **_record_blocks(width)},
            num_warps=_WARPS,
            bytes_per_element=size,
        )
        for width in _CLASS_WIDTHS
        for gradients, hessians in outputs
    ]
