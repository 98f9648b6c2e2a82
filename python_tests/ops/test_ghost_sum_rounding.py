"""Sums in float32 of gradients whose terms cancel stay within the bound of their clip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkernels.ops import clip, ghost

OPERATIONS = (
    "ghost_linear_sq_norms",
    "ghost_linear_weighted_sum_",
    "ghost_conv_norms",
)
SPREADS = [1e-2, 1e-4, 1e-6, 1e-7]


def cancelling(positions: int, inputs: int, outputs: int, spread: float) -> tuple[Tensor, Tensor]:
    """Return activations that are all but equal, and errors that add up to all but nothing."""
    generator = torch.Generator().manual_seed(positions)
    common = torch.randn(1, 1, inputs, generator=generator)
    a = common + spread * torch.randn(1, positions, inputs, generator=generator)
    d = torch.randn(1, positions, outputs, generator=generator)
    return a, d - d.mean(1, keepdim=True)


def assert_bounded(norms: ghost.LinearNorms | ghost.ConvNorms) -> None:
    bound = 0.1 * norms.sq_norms.sqrt().item()
    factors = clip.clip_factors(norms.sq_norms, bound)
    parts = [x.double() for x in norms.weighted_sum(factors) if x is not None]
    length = torch.cat([x.flatten() for x in parts]).norm().item()
    assert 0 < length <= bound * (1 + 1e-6), f"{length / bound - 1:.3g} over the bound"


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("formula", ["gram", "materialised"])
@pytest.mark.parametrize("positions", [8, 40])
def test_linear(backend: str, formula: str, positions: int, spread: float) -> None:
    a, d = cancelling(positions, 96, 96, spread)
    assert_bounded(ghost.linear_norms(a, d, bias=False, formula=formula))
    assert_bounded(ghost.linear_norms(a, d, bias=True, formula=formula))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("formula", ["gram", "materialised"])
def test_convolution(backend: str, formula: str, spread: float) -> None:
    a, d = cancelling(9, 64, 64, spread)
    x, errors = a.mT.reshape(1, 64, 3, 3), d.mT.reshape(1, 64, 3, 3)
    assert_bounded(ghost.conv_norms(x, errors, kernel_size=1, bias=False, formula=formula))
