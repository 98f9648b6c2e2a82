"""Soft threshold and singular values: the same on every backend, for any shape and layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dpkernels
from dpkernels.ops import tsvd
from python_tests.ops import tsvd_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = cases.OPERATIONS


def assert_kept(tensors: list[Tensor], thresholds: list[float], kept: list[Tensor]) -> None:
    """Assert that ``kept`` counts the singular values above the thresholds in every slice."""
    for x, threshold, count in zip(tensors, thresholds, kept, strict=True):
        above = (cases.exact_values(x) > threshold).sum(1)
        assert count.dtype == torch.int64
        assert count.tolist() == above[: x.shape[2] // 2 + 1].tolist()


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.9])
def test_every_backend_thresholds_the_singular_values(backend: str, quantile: float) -> None:
    tensors = [cases.clients(*shape) for shape in cases.SHAPES]
    thresholds = [cases.threshold_between(x, quantile) for x in tensors]
    result = cases.check(tensors, thresholds)
    assert_kept(tensors, thresholds, result.kept)


@pytest.mark.parametrize("shape", cases.LARGE_SHAPES)
def test_shapes_beyond_a_block(cpp: str, shape: tuple[int, int, int]) -> None:
    tensors = [cases.clients(*shape)]
    thresholds = [cases.threshold_between(tensors[0])]
    result = cases.check(tensors, thresholds)
    assert_kept(tensors, thresholds, result.kept)


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12)),
    quantile=st.floats(0, 1),
)
def test_any_shape(cpp: str, shape: tuple[int, int, int], quantile: float) -> None:
    # The second tensor sets the scale of what plain PyTorch's error is.
    tensors = [cases.clients(*shape), cases.clients(20, 19, 4)]
    thresholds = [cases.threshold_between(x, quantile) for x in tensors]
    result = cases.check(tensors, thresholds)
    assert_kept(tensors, thresholds, result.kept)


def test_one_client_is_a_matrix(backend: str) -> None:
    x = cases.clients(20, 12, 1)
    u, s, vh = torch.linalg.svd(x[..., 0].double(), full_matrices=False)
    threshold = (0.5 * (s[5] + s[6])).item()
    exact = u[:, :6] * (s[:6] - threshold) @ vh[:6]
    out, kept = tsvd.soft_threshold(x, threshold)
    assert_as_accurate(
        out[..., 0], cases.plain([x], [threshold], torch.float32).view(20, 12), exact
    )
    assert kept.tolist() == [6]


def test_equal_clients_stay_equal(backend: str) -> None:
    # All of it is in slice 0, which is K times the weights: the threshold counts 1 / K.
    weights, count = cases.clients(15, 10, 1), 8
    s = torch.linalg.svdvals(weights[..., 0])
    threshold = (0.5 * (s[3] + s[4])).item() * count
    out, kept = tsvd.soft_threshold(weights.expand(15, 10, count), threshold)
    assert kept.tolist() == [4, 0, 0, 0, 0]
    exact = cases.plain([weights], [threshold / count], torch.float64).view(15, 10, 1)
    plain = cases.plain([weights.expand(15, 10, count)], [threshold], torch.float32)
    assert_as_accurate(out, plain.view(15, 10, count), exact.expand(15, 10, count))


def test_a_threshold_above_all_leaves_exact_zeros(backend: str) -> None:
    x = cases.clients(12, 9, 5)
    largest = cases.exact_values(x).max().item()
    for threshold in (1.001 * largest, 1e30):
        out, kept = tsvd.soft_threshold(x, threshold)
        assert not out.any() and not kept.any()


def test_a_zero_tensor_stays_zero(backend: str) -> None:
    out, kept = tsvd.soft_threshold(torch.zeros(6, 4, 3), 1e-30)
    assert not out.any() and not kept.any()
    assert not tsvd.singular_values(torch.zeros(6, 4, 3)).any()


def test_a_threshold_of_zero_changes_nothing(backend: str) -> None:
    x = cases.clients(6, 4, 3)
    out, kept = tsvd.soft_threshold([x, x, x[:0]], [0.0, 1.0, 1.0])
    assert torch.equal(out[0], x) and out[0].data_ptr() != x.data_ptr()
    assert not torch.equal(out[1], x)
    assert kept[0].tolist() == [4, 4] and kept[2].tolist() == [0, 0]


def graded(d: int, h: int, count: int, ratio: float) -> Tensor:
    """Return clients whose slices have singular values ``1, ratio, ratio^2, ...``."""
    slices = torch.fft.rfft(cases.clients(d, h, count, torch.float64), dim=2).permute(2, 0, 1)
    u, s, vh = torch.linalg.svd(slices, full_matrices=False)
    values = ratio ** torch.arange(s.shape[1], dtype=torch.float64)
    scaled = (u * values) @ vh
    return torch.fft.irfft(scaled.permute(1, 2, 0), n=count, dim=2).float()


# From well inside what the Gram matrix serves to well below its bound, 2^-24 |M|_F: 6.0e-8 for the
# first of the tensors.
@pytest.mark.parametrize("threshold", [3e-2, 3e-7, 6.1e-8, 5.9e-8, 1e-30])
def test_thresholds_on_both_sides_of_the_bound(backend: str, threshold: float) -> None:
    cases.check([graded(20, 12, 4, 0.1), graded(9, 14, 3, 0.9)], [threshold, threshold])


@pytest.mark.parametrize(("threshold", "below"), [(6.1e-8, False), (5.9e-8, True)])
def test_an_svd_is_taken_below_the_bound_only(backend: str, threshold: float, below: bool) -> None:
    x = graded(20, 12, 4, 0.1)
    with torch.profiler.profile() as profiled:
        tsvd.soft_threshold(x, threshold)
    called = {event.name for event in profiled.events()}
    assert ("aten::linalg_svd" in called) == (below or backend == "reference")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_any_scale(backend: str, scale: float) -> None:
    tensors = [scale * cases.clients(15, 8, 4), scale * cases.clients(7, 9, 3)]
    cases.check(tensors, [cases.threshold_between(x) for x in tensors])


def test_repeated_singular_values(backend: str) -> None:
    # Orthogonal matrices, alike up to the sign: slices 0 and 2 have one singular value, 16 times.
    q = torch.linalg.qr(cases.clients(16, 16, 1, torch.float64)[..., 0]).Q
    x = torch.stack((q, -0.5 * q, q, -0.5 * q), -1).float()
    cases.check([x, cases.clients(16, 16, 4)], [0.5, 0.5])


def test_low_rank_with_an_exact_null_space(backend: str) -> None:
    x = cases.clients(30, 3, 5)
    wide = torch.cat((x, x, torch.zeros_like(x), 2 * x), 1)
    result = cases.check([wide], [cases.threshold_between(x, 0.1)])
    assert result.kept[0].max() <= 3


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_any_layout(backend: str, layout: str) -> None:
    tensors = [cases.clients(19, 9, 5), cases.clients(9, 19, 6)]
    views = [cases.LAYOUTS[layout](x) for x in tensors]
    result = cases.check(views, [cases.threshold_between(x) for x in tensors])
    check_values(views)
    for x, view, out in zip(tensors, views, result.tensors, strict=True):
        assert torch.equal(view, x), "the input was written"
        assert out.stride() == torch.empty_like(view).stride()


def test_a_list_is_its_tensors_one_by_one(backend: str) -> None:
    tensors = [cases.clients(*shape) for shape in cases.SHAPES]
    thresholds = [cases.threshold_between(x) for x in tensors]
    together = tsvd.soft_threshold(tensors, thresholds)
    values = tsvd.singular_values(tensors)
    for i, (x, threshold) in enumerate(zip(tensors, thresholds, strict=True)):
        alone = tsvd.soft_threshold(x, threshold)
        assert torch.equal(alone.tensors, together.tensors[i])
        assert torch.equal(alone.kept, together.kept[i])
        assert torch.equal(tsvd.singular_values(x), values[i])
    same = tsvd.soft_threshold(tensors, 2.0)
    assert torch.equal(same.tensors[3], tsvd.soft_threshold(tensors[3], 2.0).tensors)


def test_any_number_of_threads_gives_the_same_bits(cpp: str, threads: int) -> None:
    tensors = [cases.clients(300, 20, 5), cases.clients(30, 40, 4), cases.clients(3, 2, 9)]
    several = tsvd.soft_threshold(tensors, 8.0)
    values = tsvd.singular_values(tensors)
    torch.set_num_threads(1)
    alone = tsvd.soft_threshold(tensors, 8.0)
    assert all(map(torch.equal, several.tensors, alone.tensors))
    assert all(map(torch.equal, values, tsvd.singular_values(tensors)))


def check_values(tensors: list[Tensor]) -> None:
    """Assert that the singular values of float32 tensors are as accurate as plain PyTorch's."""
    found = tsvd.singular_values(tensors)
    exact = []
    for x, values in zip(tensors, found, strict=True):
        assert values.dtype == x.dtype
        assert (values[:, :-1] >= values[:, 1:]).all(), "largest first"
        exact.append(cases.exact_values(x)[: x.shape[2] // 2 + 1])
        assert values.shape == exact[-1].shape
    with dpkernels.use_backend("reference"):
        plain = tsvd.singular_values(tensors)
    flat = [torch.cat([v.flatten() for v in values]) for values in (found, plain, exact)]
    assert_as_accurate(*flat)


def test_singular_values_are_those_of_the_slices(backend: str) -> None:
    check_values([cases.clients(*shape) for shape in cases.SHAPES])


def test_small_singular_values_are_as_good_as_float32_allows(backend: str) -> None:
    check_values([graded(20, 12, 4, 0.1)])


def test_float64_is_served_by_the_reference() -> None:
    for operation in OPERATIONS:
        assert dpkernels.explain(operation, dtype=torch.float64).chosen == "reference"
    x = cases.clients(14, 9, 5, torch.float64)
    threshold = cases.threshold_between(x)
    slices = torch.fft.fft(x, dim=2)
    for k in range(5):
        u, s, vh = torch.linalg.svd(slices[..., k], full_matrices=False)
        slices[..., k] = (u * (s - threshold).clamp(min=0)) @ vh
    exact = torch.fft.ifft(slices, dim=2).real
    out, kept = tsvd.soft_threshold(x, threshold)
    plain = tsvd.soft_threshold(x.transpose(0, 1), threshold).tensors.transpose(0, 1)
    assert_as_accurate(out, plain, exact)
    assert_kept([x], [threshold], [kept])
    with dpkernels.use_backend("cpp"), pytest.raises(dpkernels.BackendUnavailable, match="float64"):
        tsvd.soft_threshold(x, threshold)
