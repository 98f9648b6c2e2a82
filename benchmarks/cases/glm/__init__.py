"""``glm``: clipped sums and Newton steps of softmax regression, against plain PyTorch.

B records of d features and C classes for each of n clients, float32; P = C (C + 1) / 2 pairs of
classes, m = C d. Counted are:

==========================  ============================  ======================================
case                        flops                         bytes
==========================  ============================  ======================================
clipped Hessian sum         B P d (d + 1)                 4 (m^2 + B d): features, result
feature covariance          n (B d (d + 1) + d^3 / 3)     4 n (B d + 2 d^2)
record norms                2 n B m                       4 n B d
clipped gradient sums       4 n B m                       4 n (B d + 2 m)
solve                       n (m^3 / 3 + 2 m^2)           4 n (m^2 / 2 + 2 m): one triangle
Hessian sum and solve       n (B (P - C) d (d + 1)        4 n (B d + 3 m); k = m - d, because one
                            + k^3 / 3 + 2 k^2)            class less is enough (``newton_step``)
conjugate gradients         40 n B m: ten iterations     4 n (B d + 3 m)
==========================  ============================  ======================================
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cases.glm.data import Size
from benchmarks.cases.glm.rounds import CHOLESKY_LOOP, gradient_case
from benchmarks.cases.glm.rounds import LOOP as CLIENTS
from benchmarks.cases.glm.solves import LOOP, cg_case, newton_case, solve_case
from benchmarks.cases.glm.sums import (
    VMAP,
    covariance_case,
    fused_case,
    hessian_case,
    norms_case,
)
from benchmarks.registry import Case, Target


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield the Hessian sums of the claim, one round of 500 clients, and the other operations."""
    if quick:
        small = Size(6, 20, 8, 3)
        yield hessian_case(Size(1, 20, 8, 3), Target(), with_vmap=True)
        yield from (case(small) for case in (fused_case, norms_case, covariance_case))
        yield gradient_case(small, Target())
        yield cg_case(small, Target())
        yield solve_case(small, Target())
        yield newton_case(small, Target())
        return
    yield hessian_case(Size(1, 256, 64, 10), Target(20.0, VMAP), with_vmap=True)
    yield hessian_case(Size(1, 256, 512, 10), Target(megabytes=300.0), with_vmap=False)
    yield fused_case(Size(50, 100, 64, 10))
    yield norms_case(Size(500, 100, 64, 10))
    yield covariance_case(Size(500, 100, 100, 10))
    yield solve_case(Size(500, 100, 64, 10), Target(2.0, LOOP))
    yield newton_case(Size(500, 100, 64, 10), Target(5.0, CHOLESKY_LOOP))
    yield newton_case(Size(500, 100, 123, 2), Target())
    yield gradient_case(Size(500, 100, 64, 10), Target(10.0, CLIENTS))
    yield cg_case(Size(500, 100, 64, 10), Target(10.0, CLIENTS))
