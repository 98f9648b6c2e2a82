"""The tolerance accepts what is as accurate as plain PyTorch, and nothing else."""

from __future__ import annotations

import pytest
import torch

from dpkernels.ops.ghost.rounding import sum_error
from python_tests.tolerance import assert_as_accurate, assert_never_low, assert_within_rounding

EXACT = torch.tensor([1.0, -3.0, 4.0], dtype=torch.float64)
ULP = 4.0 * torch.finfo(torch.float32).eps


def test_twice_the_plain_error_and_one_ulp_pass_and_more_does_not() -> None:
    plain = EXACT.float() + torch.tensor([0.0, 0.25, 0.0])
    assert_as_accurate(EXACT.float() + 0.5, plain, EXACT)
    assert_as_accurate(EXACT.float() + torch.tensor([0.0, 0.0, ULP]), EXACT.float(), EXACT)
    with pytest.raises(AssertionError, match="exceeds twice"):
        assert_as_accurate(EXACT.float() + 0.50001, plain, EXACT)
    with pytest.raises(AssertionError, match="exceeds twice"):
        assert_as_accurate(EXACT.float() + torch.tensor([0.0, 0.0, 2 * ULP]), EXACT.float(), EXACT)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_element_fails(bad: float) -> None:
    with pytest.raises(AssertionError, match="non-finite"):
        assert_as_accurate(torch.tensor([1.0, bad, 4.0]), EXACT.float(), EXACT)


def test_wrong_dtype_or_shape_fails() -> None:
    with pytest.raises(AssertionError, match="dtype"):
        assert_as_accurate(EXACT, EXACT.float(), EXACT)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_accurate(EXACT.float()[:2], EXACT.float(), EXACT)


def test_a_plain_result_that_overflows_excuses_nothing() -> None:
    plain = torch.tensor([1.0, float("inf"), 4.0])
    with pytest.raises(AssertionError, match="overflows"):
        assert_as_accurate(EXACT.float(), plain, EXACT)


def test_fresh_memory_is_poisoned() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(2, 3, dtype=torch.bfloat16).new_empty(5).isnan().all()


def test_rounding_is_allowed_and_no_more() -> None:
    values = torch.linspace(-1.0, 1.0, 1001)
    forwards, backwards = values.cumsum(0)[-1:], values.flip(0).cumsum(0)[-1:]
    magnitude = values.abs().sum()
    assert_within_rounding(forwards, backwards, len(values), magnitude)
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_within_rounding(forwards, backwards + 0.2, len(values), magnitude)
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_within_rounding(forwards, torch.tensor([float("nan")]), len(values), magnitude)


def test_a_low_norm_fails_and_a_high_one_only_beyond_the_limit() -> None:
    exact, terms = torch.tensor([4.0, 0.0], dtype=torch.float64), torch.ones(2).double()
    for positions, dtype, limit in (
        (1, torch.float32, 5e-5),
        (100, torch.bfloat16, 1e-4),
        (100, torch.float64, 1e-8),
    ):
        for part in (1 - 0.9e-7, 1.0, 1 + 0.9 * limit):
            assert_never_low(exact * part**2, exact, positions, terms, dtype)
        with pytest.raises(AssertionError, match="high by"):
            assert_never_low(exact * (1 + 1.1 * limit) ** 2, exact, positions, terms, dtype)
        with pytest.raises(AssertionError, match="low by"):
            assert_never_low(exact * (1 - 1.1e-7) ** 2, exact, positions, terms, dtype)


def test_what_a_sum_may_round_comes_on_top_only_within_its_limit_of_the_norm() -> None:
    # Of terms of length 1 it is 6.6e-7: 6.6e-4 of the first norm, more than all of the second.
    exact, terms = torch.tensor([1e-6, 0.0], dtype=torch.float64), torch.ones(2).double()
    most = sum_error(torch.float32, 1)
    for first, second in ((0.9, 0.0), (0.0, 1e-14)):
        raised = exact.sqrt() + torch.tensor([first * most, second], dtype=torch.float64)
        assert_never_low(raised.square(), exact, 1, terms, torch.float32)
    for first, second in ((1.2, 0.0), (0.0, 1e-12), (0.0, 0.9 * most)):
        raised = exact.sqrt() + torch.tensor([first * most, second], dtype=torch.float64)
        with pytest.raises(AssertionError, match="high by"):
            assert_never_low(raised.square(), exact, 1, terms, torch.float32)
    with pytest.raises(AssertionError, match="low by"):
        assert_never_low(exact + torch.nan, exact, 1, terms, torch.float32)
