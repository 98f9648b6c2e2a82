"""Clip factors of samples whose gradients are spread over layers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels.ops import clip

OPERATIONS = ("layer_factors", "clip_factors")
DTYPES = [torch.float32, torch.float64]
SCALES = [1.0, 256.0, 7.0, 7 / 3, 1 / 1024, 1e-3]


def squares(layers: int = 3, batch: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(layers)
    return [
        torch.rand(batch, generator=generator, dtype=torch.float64).mul_(10.0**k)
        for k in range(layers)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["flat", "automatic"])
def test_without_a_scale_they_are_those_of_the_sum(backend: str, mode: Any, dtype: Any) -> None:
    rows = squares()
    found = clip.layer_factors(rows, 2.0, mode, dtype=dtype)
    wanted = clip.clip_factors(rows[0] + rows[1] + rows[2], 2.0, mode, dtype=dtype)
    # Two implementations, each rounded down, may differ in the last place.
    torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps, atol=0)
    assert (found < 1).any() and found.dtype == dtype


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mode", ["flat", "automatic"])
def test_the_scale_is_that_of_the_gradients(backend: str, mode: Any, scale: float) -> None:
    rows = squares()
    unit = clip.layer_factors([row * scale**2 for row in rows], 2.0, mode, dtype=torch.float64)
    found = clip.layer_factors(rows, 2.0, mode, scale=scale, dtype=torch.float64)
    # Squares, their sum, its root, a quotient and two products: ten roundings are too many.
    torch.testing.assert_close(found, unit * scale, rtol=10 * 2**-53, atol=0)


@given(
    square=st.floats(1e-60, 1e60),
    scale=st.floats(1e-3, 1e4),
    bound=st.floats(1e-3, 1e3),
)
def test_no_gradient_grows_beyond_its_bound(square: float, scale: float, bound: float) -> None:
    rows = [torch.tensor([square], dtype=torch.float64)] * 2
    (factor,) = clip.layer_factors(rows, bound, scale=scale).tolist()
    # Of the exact norm; the factor is rounded in float64 before it is rounded down.
    allowed = Fraction(bound) * (1 + Fraction(8, 2**53))
    assert Fraction(factor) ** 2 * 2 * Fraction(square) <= allowed**2
    assert factor <= scale * (1 + 2**-52)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -1.0])
def test_a_sample_that_is_not_finite_in_one_layer_gets_zero(backend: str, bad: float) -> None:
    rows = squares()
    rows[1][4] = bad * 1e6
    found = clip.layer_factors(rows, 2.0, scale=3.0)
    assert found[4] == 0 and (found != 0).sum() == 49


def test_no_samples_and_other_strides(backend: str) -> None:
    assert clip.layer_factors([torch.zeros(0, dtype=torch.float64)], 1.0).shape == (0,)
    rows = torch.stack(squares(), 1)
    found = clip.layer_factors(list(rows.unbind(1)), 2.0, scale=5.0)
    assert torch.equal(found, clip.layer_factors(squares(), 2.0, scale=5.0))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"sq_norms": []}, "at least one layer"),
        ({"sq_norms": [torch.ones(3)]}, r"must be float64 \[B\]"),
        ({"sq_norms": [*squares(1, 3), *squares(1, 4)]}, "of one B"),
        ({"mode": "per_layer"}, "mode flat or automatic"),
        ({"dtype": torch.bfloat16}, "dtype float32 or float64"),
        ({"scale": 0.0}, "scale must be a finite number > 0"),
        ({"max_norm": -1.0}, "max_norm must be a finite number > 0"),
        ({"gamma": torch.nan}, "gamma must be a finite number >= 0"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], match: str) -> None:
    arguments = {"sq_norms": squares(), "max_norm": 1.0, **changed}
    with pytest.raises(ValueError, match=match):
        clip.layer_factors(**arguments)


def test_opcheck() -> None:
    arguments = (squares(), 3.0, 1.0, False, 0.0, torch.float32)
    torch.library.opcheck(torch.ops.dpkernels.layer_factors.default, arguments)
