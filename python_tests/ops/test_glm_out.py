"""Clipped sums into the caller's buffers: what is written, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops import glm
from python_tests.conftest import running_on
from python_tests.ops.glm_cases import GRADIENT_BOUND, HESSIAN_BOUND, problem

OPERATIONS = ("glm_clipped_sums_",)
BOUNDS = {"gradient_bound": GRADIENT_BOUND, "hessian_bound": HESSIAN_BOUND}

# Three clients, one of them empty: its sums are zeros, not what was in the buffer.
DATA = problem(3, 4, [5, 0, 6])
RECORDS, THETA = DATA.records, DATA.theta


def buffers() -> tuple[Tensor, Tensor]:
    """Return buffers for gradients and Hessians whose contents must not be read."""
    return torch.full((3, 3, 4), torch.nan), torch.full((3, 12, 12), torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_written_to_the_buffers(backend: str, dtype: torch.dtype) -> None:
    data = problem(3, 4, [5, 0, 6], dtype)
    wanted = glm.clipped_sums(data.records, data.theta, **BOUNDS)
    gradients, hessians = (x.to(dtype) for x in buffers())
    found = glm.clipped_sums(
        data.records, data.theta, **BOUNDS, gradients_out=gradients, hessians_out=hessians
    )
    assert found.gradients is gradients and found.hessians is hessians
    assert torch.equal(gradients, wanted.gradients) and torch.equal(hessians, wanted.hessians)
    assert not hessians[1].any() and hessians[0].any()
    assert torch.equal(found.sq_norms.hessian, wanted.sq_norms.hessian)


def test_one_sum_alone_is_written_to_its_buffer(backend: str) -> None:
    wanted = glm.clipped_sums(RECORDS, THETA, **BOUNDS)
    gradients, hessians = buffers()
    assert glm.clipped_gradient_sum(RECORDS, THETA, GRADIENT_BOUND, out=gradients) is gradients
    assert glm.clipped_hessian_sum(RECORDS, THETA, HESSIAN_BOUND, out=hessians) is hessians
    assert torch.equal(gradients, wanted.gradients) and torch.equal(hessians, wanted.hessians)


BAD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "shape": (lambda: torch.zeros(3, 12, 11), r"out must be contiguous \[3, 12, 12\].*12, 11"),
    "clients": (lambda: torch.zeros(2, 12, 12), r"out must be contiguous \[3, 12, 12\].*\[2, "),
    "dtype": (lambda: torch.zeros(3, 12, 12).double(), "out must be .*float32.*got .*float64"),
    "device": (lambda: torch.zeros(3, 12, 12, device="meta"), "out must be .*on cpu, got .*meta"),
    "strides": (lambda: torch.zeros(3, 12, 12).mT, r"out must be contiguous.*strides"),
    "grad": (lambda: torch.zeros(3, 12, 12).requires_grad_(), "out requires grad"),
}


@pytest.mark.parametrize("name", BAD)
def test_buffers_that_are_refused(backend: str, name: str) -> None:
    make, message = BAD[name]
    out = make()
    with pytest.raises(ValueError, match=f"clipped_hessian_sum: {message}"):
        glm.clipped_hessian_sum(RECORDS, THETA, 1.0, out=out)
    assert out.device.type == "meta" or not out.any()


def test_buffers_share_no_memory(backend: str) -> None:
    memory = torch.zeros(3 * 12 * 12 + 3 * 12)
    hessians, theta = memory[: 3 * 144].view(3, 12, 12), memory[:36].view(3, 3, 4)
    with pytest.raises(ValueError, match="clipped_hessian_sum: out shares memory"):
        glm.clipped_hessian_sum(RECORDS, theta, 1.0, out=hessians)
    outs: dict[str, Any] = {"gradients_out": memory[-40:-4].view(3, 3, 4), "hessians_out": hessians}
    with pytest.raises(ValueError, match="clipped_sums: hessians_out shares memory"):
        glm.clipped_sums(RECORDS, THETA, **BOUNDS, **outs)
    assert not memory.any()


def test_the_operator_called_directly_stays_inside_its_buffers() -> None:
    gradients, hessians = buffers()
    shared = (RECORDS.x, RECORDS.labels, RECORDS.spans, RECORDS.most, THETA, 1.0, 1.0)
    with running_on("cpp", OPERATIONS):
        run = torch.ops.dpkernels.glm_clipped_sums_
        for outs in ((gradients[:2], None), (None, hessians.mT), (gradients.double(), hessians)):
            with pytest.raises(ValueError, match="gradients and hessians must be contiguous"):
                run(*outs, *shared)
        with pytest.raises(ValueError, match="shares memory"):
            run(hessians.view(-1)[:36].view(3, 3, 4), hessians, *shared)
    assert gradients.isnan().all() and hessians.isnan().all()
