"""The soft threshold solves FedCEO's proximal problem, with the threshold that Theorem 3.1 says.

``argmin_W c |W - W_N|_F^2 + |W|_*`` for ``c = 1 / (2 threshold)``, where ``|W|_*`` is the mean of
the slices' nuclear norms. Everything here is judged in float64.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops import tsvd
from python_tests.ops import tsvd_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = cases.OPERATIONS

SHAPES = [(9, 6, 1), (6, 9, 4), (7, 7, 5)]


def objective(w: Tensor, noisy: Tensor, threshold: float) -> float:
    """Return what is minimised, from its definition."""
    nuclear = torch.linalg.svdvals(torch.fft.fft(w, dim=2).permute(2, 0, 1)).sum() / w.shape[2]
    return ((w - noisy).square().sum() / (2 * threshold) + nuclear).item()


@pytest.mark.parametrize("quantile", [0.2, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_near_or_far_is_lower(shape: tuple[int, int, int], quantile: float) -> None:
    noisy = cases.clients(*shape, torch.float64)
    threshold = cases.threshold_between(noisy, quantile)
    best = tsvd.soft_threshold(noisy, threshold).tensors
    least = objective(best, noisy, threshold)
    generator = torch.Generator().manual_seed(1)
    others = [noisy, torch.zeros_like(noisy), 0.9 * best, noisy.mean(2, True).expand(shape)]
    others += [tsvd.soft_threshold(noisy, f * threshold).tensors for f in (0.5, 0.9, 1.1, 2.0)]
    others += [
        best + size * torch.randn(shape, generator=generator, dtype=torch.float64)
        for size in (1e-4, 1e-2, 1.0)
        for _ in range(10)
    ]
    for other in others:
        # The objective is strongly convex: it rises at least by c |W - best|_F^2.
        rise = (other - best).square().sum().item() / (2 * threshold)
        assert objective(other, noisy, threshold) >= least + rise - 1e-13 * least


@pytest.mark.parametrize("shape", SHAPES)
def test_the_residual_is_a_subgradient(backend: str, shape: tuple[int, int, int]) -> None:
    noisy = cases.clients(*shape)
    threshold = cases.threshold_between(noisy)
    out = tsvd.soft_threshold(noisy, threshold).tensors
    slices = [torch.fft.fft(x.double(), dim=2).permute(2, 0, 1) for x in (noisy, out)]
    subgradient = (slices[0] - slices[1]) / threshold
    # Z is a subgradient of |F|_* at F if its spectral norm is at most 1 and <Z, F> = |F|_*. Each
    # element is off by about an ulp of the largest singular value; 2 n of them add up.
    values = torch.linalg.svdvals(slices[0])
    rounding = 2 * sum(shape) * torch.finfo(torch.float32).eps * values.max() / threshold
    assert torch.linalg.svdvals(subgradient).max() <= 1 + rounding
    product = (subgradient.conj() * slices[1]).real.sum((1, 2))
    nuclear = torch.linalg.svdvals(slices[1]).sum(1)
    assert ((product - nuclear).abs() <= rounding * values.sum(1)).all()


@given(scale=st.floats(1e-3, 10), quantile=st.floats(0, 1), seed=st.integers(0, 1000))
def test_it_moves_two_tensors_no_further_apart(
    cpp: str, scale: float, quantile: float, seed: int
) -> None:
    x = cases.clients(12, 8, 5)
    shift = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    y = x + scale * shift
    threshold = cases.threshold_between(x, quantile)
    a, b = tsvd.soft_threshold([x, y], threshold).tensors
    apart = (x.double() - y.double()).norm()
    rounding = torch.finfo(torch.float32).eps * (x.norm() + y.norm())
    assert (a.double() - b.double()).norm() <= apart + rounding


def test_the_nuclear_norm_is_the_mean_over_all_slices(backend: str) -> None:
    tensors = [cases.clients(*shape) for shape in cases.SHAPES]
    exact = torch.stack([cases.exact_values(x).sum() / x.shape[2] for x in tensors])
    found = tsvd.nuclear_norm(tensors)
    assert found.dtype == torch.float64
    plain = [
        torch.linalg.svdvals(torch.fft.fft(x, dim=2).permute(2, 0, 1)).sum() / x.shape[2]
        for x in tensors
    ]
    assert_as_accurate(found.float(), torch.stack(plain), exact)
    assert torch.equal(tsvd.nuclear_norm(tensors[3]), found[3])
    assert tsvd.nuclear_norm([torch.zeros(0, 3, 2), torch.zeros(2, 2, 2)]).tolist() == [0.0, 0.0]


def test_the_threshold_takes_from_the_nuclear_norm_what_it_says(backend: str) -> None:
    # Every kept singular value loses the threshold, the others all they have.
    x = cases.clients(14, 10, 6)
    threshold = cases.threshold_between(x)
    lost = cases.exact_values(x).clamp(max=threshold).sum() / 6
    out, kept = tsvd.soft_threshold(x, threshold)
    before, after = tsvd.nuclear_norm([x, out])
    exact = torch.stack((lost,))
    plain_out = cases.plain([x], [threshold], torch.float32).view(x.shape)
    plain = [cases.exact_values(y).sum().float() / 6 for y in (x, plain_out)]
    assert_as_accurate((before - after).float().view(1), (plain[0] - plain[1]).view(1), exact)
    assert kept.sum() > 0
