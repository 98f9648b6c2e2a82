"""The ``glm`` operators: schemas, what ``torch.compile`` sees of them, what implements them.

All take ``x [N, d]``, ``spans [clients, 2]`` and ``most`` of ``Records``, and ``theta`` as
``[1 or clients, C, d]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels import backend
from dpkernels.ops.glm import reference
from dpkernels.ops.glm.records import DTYPES


def _fake_norms(
    x: Tensor, labels: Tensor, spans: Tensor, most: int, theta: Tensor
) -> tuple[Tensor, Tensor]:
    count = x.shape[0]
    return x.new_empty(count, dtype=torch.float64), x.new_empty(count, dtype=torch.float64)


def _fake_sums(
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
    gradient, hessian = _fake_norms(x, labels, spans, most, theta)
    nothing = x.new_empty(0, dtype=torch.float64)
    return (
        nothing if gradients is None else gradient,
        nothing.clone() if hessians is None else hessian,
    )


def _fake_covariance(x: Tensor, spans: Tensor, most: int, bound: float) -> tuple[Tensor, Tensor]:
    features = x.shape[1]
    sums = x.new_empty(spans.shape[0], features, features)
    return sums, x.new_empty(x.shape[0], dtype=torch.float64)


def _fake_solve(hessians: Tensor, v: Tensor, gammas: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(v.shape[0], dtype=torch.int64)


def _fake_newton(
    x: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    hessian_bound: float,
    v: Tensor,
    gammas: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    failed = v.new_empty(v.shape[0], dtype=torch.int64)
    return v.new_empty(v.shape), failed, x.new_empty(x.shape[0], dtype=torch.float64)


def _fake_newton_cg(
    x: Tensor,
    spans: Tensor,
    most: int,
    theta: Tensor,
    hessian_bound: float,
    v: Tensor,
    gammas: Tensor,
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    solutions, iterations, sq_norms = _fake_newton(x, spans, most, theta, hessian_bound, v, gammas)
    return solutions, iterations, v.new_empty(v.shape[0], dtype=torch.float64), sq_norms


record_norms = backend.register(
    "glm_record_norms(Tensor x, Tensor labels, Tensor spans, SymInt most, Tensor theta) "
    "-> (Tensor gradient_sq_norms, Tensor hessian_sq_norms)",
    reference=reference.glm_record_norms,
    fake=_fake_norms,
    dtypes=DTYPES,
    triton="dpkernels.ops.glm.triton_impl:glm_record_norms",
)
# Norms are those of what is summed; empty, [0], for a sum that is not asked for.
clipped_sums = backend.register(
    "glm_clipped_sums_(Tensor(a!)? gradients, Tensor(b!)? hessians, Tensor x, Tensor labels, "
    "Tensor spans, SymInt most, Tensor theta, float gradient_bound, float hessian_bound) "
    "-> (Tensor gradient_sq_norms, Tensor hessian_sq_norms)",
    reference=reference.glm_clipped_sums_,
    fake=_fake_sums,
    dtypes=DTYPES,
    triton="dpkernels.ops.glm.triton_impl:glm_clipped_sums_",
)
feature_covariance = backend.register(
    "glm_feature_covariance(Tensor x, Tensor spans, SymInt most, float bound) "
    "-> (Tensor covariances, Tensor sq_norms)",
    reference=reference.glm_feature_covariance,
    fake=_fake_covariance,
    dtypes=DTYPES,
    triton="dpkernels.ops.glm.triton_impl:glm_feature_covariance",
)
# A batched Cholesky factorisation is what torch.linalg does on GPUs: nothing for Triton to add.
solve = backend.register(
    "glm_solve(Tensor hessians, Tensor v, Tensor gammas) -> (Tensor solutions, Tensor failed)",
    reference=reference.glm_solve,
    fake=_fake_solve,
    dtypes=DTYPES,
)
newton = backend.register(
    "glm_newton(Tensor x, Tensor spans, SymInt most, Tensor theta, float hessian_bound, Tensor v, "
    "Tensor gammas) -> (Tensor solutions, Tensor failed, Tensor hessian_sq_norms)",
    reference=reference.glm_newton,
    fake=_fake_newton,
    dtypes=DTYPES,
    triton="dpkernels.ops.glm.triton_impl:glm_newton",
)
# On GPUs the two products of an iteration are batched products of torch; what is left between them
# is a few launches over [clients, most, C], which no kernel of ours would save much of.
newton_cg = backend.register(
    "glm_newton_cg(Tensor x, Tensor spans, SymInt most, Tensor theta, float hessian_bound, "
    "Tensor v, Tensor gammas, float tolerance, int max_iterations) "
    "-> (Tensor solutions, Tensor iterations, Tensor residuals, Tensor hessian_sq_norms)",
    reference=reference.glm_newton_cg,
    fake=_fake_newton_cg,
    dtypes=DTYPES,
)
