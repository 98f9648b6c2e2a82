"""The product that the compiled kernels share, in one thread on any strides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dpkernels import backend as backends
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ()

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "strided": lambda x: np.repeat(np.repeat(x, 2, axis=0), 3, axis=1)[::2, ::3],
}
# Empty, single, under and over a tile of any instruction set (6 x 16, 14 x 32), over a block of
# rows (168), of depth (320) and of columns (1024).
SHAPES = [
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (2, 5, 3),
    (7, 17, 33),
    (13, 9, 15),
    (29, 321, 31),
    (169, 3, 18),
    (5, 6, 1030),
    (170, 650, 40),
]


def operand(rows: int, cols: int, dtype: str, layout: str, seed: int) -> np.ndarray:
    """Return normal numbers in a layout."""
    x = np.random.default_rng(seed).standard_normal((rows, cols)).astype(dtype)
    return LAYOUTS[layout](x)


def poison(rows: int, cols: int, dtype: str) -> np.ndarray:
    """Return rows of NaN that are three elements longer than they look."""
    return np.full((rows, cols + 3), np.nan, dtype)[:, :cols]


def assert_is_product(c: np.ndarray, a: np.ndarray, b: np.ndarray, start: np.ndarray) -> None:
    """Assert c = start + a b as accurately as PyTorch has it."""
    plain = torch.addmm(torch.from_numpy(start.copy()), torch.tensor(a), torch.tensor(b))
    # Extended precision: in float64 the plain product would be its own judge.
    exact = start.astype(np.longdouble) + a.astype(np.longdouble) @ b.astype(np.longdouble)
    assert_as_accurate(torch.tensor(c), plain, torch.tensor(exact.astype(np.float64)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_product(cpp: str, shape: tuple[int, int, int], dtype: str) -> None:
    assert backends.extension is not None
    m, k, n = shape
    for index, (of_a, of_b) in enumerate((a, b) for a in LAYOUTS for b in LAYOUTS):
        a = operand(m, k, dtype, of_a, index)
        b = operand(k, n, dtype, of_b, index + 100)
        c = poison(m, n, dtype)
        backends.extension.gemm(a, b, c, False, False)
        assert_is_product(c, a, b, np.zeros((m, n), dtype))
        start = c.copy()
        backends.extension.gemm(a, b, c, True, False)
        assert_is_product(c, a, b, start)
        if n:
            assert np.isnan(np.lib.stride_tricks.as_strided(c, (m, n + 3))[:, n:]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (5, 0), (17, 3), (33, 40), (200, 325)])
def test_upper_triangle(cpp: str, n: int, k: int, dtype: str) -> None:
    assert backends.extension is not None
    for layout in LAYOUTS:
        a = operand(n, k, dtype, layout, n)
        c = poison(n, n, dtype)
        backends.extension.gemm(a, a.T, c, False, True)
        upper = np.triu(np.ones((n, n), bool))
        assert_is_product(np.where(upper, c, a @ a.T), a, a.T, np.zeros((n, n), dtype))
    if n == 200:
        # Half of the work: whole tiles below the diagonal are never written.
        assert np.isnan(c[100:, :50]).all()


def test_one_value_and_nan_go_where_they_belong(cpp: str) -> None:
    assert backends.extension is not None
    a, b = np.zeros((20, 30), "float32"), np.zeros((30, 40), "float32")
    a[13, 7], b[7, 22] = 2.0, 3.0
    a[4, 0], b[0, 5] = np.nan, 1.0
    c = poison(20, 40, "float32")
    backends.extension.gemm(a, b, c, False, False)
    assert c[13, 22] == 6.0 and np.isnan(c[4]).all()
    c[13, 22], c[4] = 0.0, 0.0
    assert not c.any()


@pytest.mark.parametrize(
    ("a", "b", "c", "match"),
    [
        (np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), "shapes"),
        (np.ones((2, 3)), np.ones((3, 2)), np.ones((2, 3)), "shapes"),
        (np.ones((2, 3)), np.ones((3, 2)), np.ones((2, 2)).T.copy().T[:, ::-1], "shapes"),
        (np.ones((2, 3)), np.ones((3, 2), "float32"), np.ones((2, 2)), "dtype"),
        (*(np.ones((2, 2), "int32"),) * 3, "float32 or float64"),
    ],
)
def test_bad_input(cpp: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, match: str) -> None:
    assert backends.extension is not None
    with pytest.raises(ValueError, match=match):
        backends.extension.gemm(a, b, c, False, False)
