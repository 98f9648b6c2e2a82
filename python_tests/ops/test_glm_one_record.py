"""What one record adds to a sum depends on it and on theta alone, to the last bit.

A record more or less must not change how the others round: the sum would move by more than the
record's bound. Every record here has a feature of its own, 1 for it and 0 for all others, so that
the column of that feature is the record's weighted residual, untouched by any addition.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkernels.ops import glm
from dpkernels.ops.glm import Records

OPERATIONS = ("glm_clipped_sums_",)
# One over a group of 32 records and over a block of 128, and a last vector that is not full.
COUNTS = [33, 100, 131]
SHARED = 13


def tagged(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return records of several scales with their tags, labels, and theta for 7 classes."""
    generator = torch.Generator().manual_seed(count)
    scales = torch.randn(count, 1, generator=generator).mul(2).exp()
    dense = torch.randn(count, SHARED, generator=generator) * scales
    x = torch.cat((dense, torch.eye(count)), 1)
    theta = torch.randn(7, SHARED + count, generator=generator)
    labels = torch.randint(7, (count,), generator=generator)
    return x.to(dtype), labels, theta.to(dtype)


def contributions(x: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
    """Return the weighted residuals of all tagged records of one client, ``[C, count]``."""
    records = Records.ragged(x, labels, [0, len(x)])
    return glm.clipped_gradient_sum(records, theta, 0.7)[0, :, SHARED:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", COUNTS)
def test_order_changes_no_contribution(cpp: str, count: int, dtype: torch.dtype) -> None:
    x, labels, theta = tagged(count, dtype)
    wanted = contributions(x, labels, theta)
    for seed in range(3):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(contributions(x[order], labels[order], theta), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", COUNTS)
def test_a_record_less_changes_no_other_contribution(
    cpp: str, count: int, dtype: torch.dtype
) -> None:
    x, labels, theta = tagged(count, dtype)
    wanted = contributions(x, labels, theta)
    for left_out in (0, 15, 31, 32, count - 1):
        rest = torch.arange(count) != left_out
        found = contributions(x[rest], labels[rest], theta)
        assert torch.equal(found[:, rest], wanted[:, rest])
        assert not found[:, left_out].any(), "a record that is not there adds something"


@pytest.mark.parametrize("count", COUNTS)
def test_a_record_alone_adds_what_it_adds_among_others(cpp: str, count: int) -> None:
    x, labels, theta = tagged(count, torch.float32)
    wanted = contributions(x, labels, theta)
    for row in (0, 20, count - 1):
        found = contributions(x[row : row + 1], labels[row : row + 1], theta)
        assert torch.equal(found[:, row], wanted[:, row])
        # The norm of the whole contribution, from what was summed, in float64.
        whole = found[:, row].double().norm() * x[row].double().norm()
        assert whole <= 0.7 * (1 + 1e-6)
