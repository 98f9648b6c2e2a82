"""Rule 3 against data made to round one way: no norm of a linear or convolutional layer is low.

Sums of equal numbers round the same way at every addition, and alternating signs make what is left
small beside that. Random data, whose errors cancel, never shows it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkernels.ops import ghost
from dpkernels.ops.factor import Diagonal
from python_tests.conftest import CPP
from python_tests.tolerance import assert_never_low

OPERATIONS = ("ghost_linear_sq_norms", "ghost_conv_norms", "ghost_embedding_sq_norms",
              "row_sq_norms")  # fmt: skip

FORMULAS = ["gram", "materialised"]
# Which axes of activations and errors [B, positions, elements] hold one number only.
FAMILIES = {
    "constant rows": ((2,), (2,)),
    "constant activations": ((2,), ()),
    "constant samples": ((1, 2), (1, 2)),
    "activations constant over positions": ((1, 2), (2,)),
    "errors constant over positions": ((2,), (1, 2)),
    "constant errors": ((), (2,)),
}


def vectors(size: tuple[int, int, int], constant: tuple[int, ...]) -> Tensor:
    """Return numbers between 0.5 and 1.5, the same along the axes in ``constant``."""
    shape = [1 if axis in constant else n for axis, n in enumerate(size)]
    return (torch.rand(shape) + 0.5).expand(size)


def signs(batch: int, positions: int, uneven: bool) -> Tensor:
    """Return factors of positions that cancel in part: alternating, by a share of each sample."""
    found = torch.ones(batch, positions)
    if uneven:
        found += 0.3 * torch.rand(batch, positions)
    found[:, 1::2] = -torch.rand(batch, 1)
    return found


def family(
    name: str, batch: int, positions: int, features: int, outputs: int, uneven: bool
) -> tuple[Tensor, Tensor]:
    """Return activations ``[B, T, I]`` and errors ``[B, T, O]``."""
    torch.manual_seed(positions)
    a_constant, d_constant = FAMILIES[name]
    a = vectors((batch, positions, features), a_constant)
    d = vectors((batch, positions, outputs), d_constant)
    return a.contiguous(), d * signs(batch, positions, uneven)[:, :, None]


def check_linear(a: Tensor, d: Tensor, formula: str) -> None:
    norms = ghost.linear_norms(a, d, bias=False, formula=formula)
    assert not norms.stored
    exact = (d.double().mT @ a.double()).square().sum((1, 2))
    terms = (a.double().norm(dim=2) * d.double().norm(dim=2)).sum(1)
    assert_never_low(norms.sq_norms, exact, a.shape[1], terms, a.dtype)


# Positions, I, O: a chain of products and one more, several, and less than one.
LINEAR = [(2, 768, 5), (2, 32, 2), (4, 33, 33), (8, 160, 64), (3, 96, 96), (64, 80, 70)]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_linear_norms(cpp: str, formula: str, name: str, uneven: bool) -> None:
    for positions, features, outputs in LINEAR:
        batch = max(32, min(400, 100_000 // (positions * features)))
        check_linear(*family(name, batch, positions, features, outputs, uneven), formula)


@pytest.mark.parametrize("name", ["constant rows", "activations constant over positions"])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("backend", ["reference", "triton"], indirect=True)
def test_linear_norms_of_other_backends(backend: str, formula: str, name: str) -> None:
    for positions, features, outputs in ((2, 33, 2), (8, 30, 12)):
        check_linear(*family(name, 24, positions, features, outputs, True), formula)


def test_half_precision_linear_norms(cpp: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        a, d = family("constant rows", 100, 8, 160, 64, True)
        for formula in FORMULAS:
            check_linear(a.to(dtype), d.to(dtype), formula)


def check_conv(
    name: str, size: tuple[int, int, int, int], formula: str, scale: bool, batch: int
) -> None:
    """Assert that the norms of a 2 x 2 convolution of ``height`` by ``width`` inputs are right."""
    channels, outputs, height, width = size
    rows, columns = height - 1, width - 1
    x, _ = family(name, batch, height * width, channels, outputs, False)
    _, d = family(name, batch, rows * columns, channels, outputs, True)
    x = x.mT.reshape(batch, channels, height, width).contiguous()
    d = d.mT.reshape(batch, outputs, rows, columns).contiguous()
    patches = torch.nn.functional.unfold(x.double(), 2)
    right = None
    if scale:
        right = Diagonal(torch.linspace(0.01, 2.0, patches.shape[1]))
        patches = patches * right.values.double()[:, None]
    errors = d.double().flatten(2)
    norms = ghost.conv_norms(x, d, kernel_size=2, bias=False, formula=formula, right=right)
    exact = (errors @ patches.mT).square().sum((1, 2))
    # What float64 leaves is bounded through the lengths of all patches and all errors.
    terms = 2 * x.double().flatten(1).norm(dim=1) * errors.flatten(1).norm(dim=1)
    if right is not None:
        terms = terms * right.values.abs().max()
    assert_never_low(norms.sq_norms, exact, rows * columns, terms, x.dtype)


# Channels, outputs, input: long and narrow (a lane's chain is full at 256 positions), and wide.
CONVOLUTIONS = [(2, 3, 25, 25), (40, 33, 3, 4), (3, 70, 5, 5)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_conv_norms(cpp: str, formula: str, name: str) -> None:
    for size in CONVOLUTIONS[formula == "gram" :]:
        check_conv(name, size, formula, False, 64)


@pytest.mark.parametrize("name", ["constant samples", "constant rows"])
def test_scaled_conv_norms(cpp: str, name: str) -> None:
    for size in CONVOLUTIONS:
        check_conv(name, size, "materialised", True, 64)


@pytest.mark.parametrize("name", ["constant samples", "constant rows"])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("backend", ["reference", "triton"], indirect=True)
def test_conv_norms_of_other_backends(backend: str, formula: str, name: str) -> None:
    check_conv(name, (18, 3, 4, 6), formula, False, 6)
    if formula == "materialised":
        check_conv(name, (3, 2, 4, 6), formula, True, 6)


@pytest.mark.parametrize("backend", ["reference", *CPP, "triton"], indirect=True)
def test_what_even_float64_loses_of_a_sum_counts(backend: str) -> None:
    # 1e30 hides a 1 in between: of the sum over positions, 1 is left, and float64 finds 0.
    d = torch.tensor([1e30, 1.0, -1e30]).view(1, 3, 1)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    embedding = ghost.embedding_norms(tokens, d, num_embeddings=4)
    bias = ghost.linear_norms(torch.zeros(1, 3, 2), d, formula="gram")
    conv = ghost.conv_norms(
        torch.zeros(1, 1, 3), d.mT.contiguous(), kernel_size=1, formula="materialised"
    )
    # Linear layers and convolutions count what a sum in float32 rounds, too; those of a convolution
    # that keeps its gradients are rounded once.
    for norms, most in ((embedding, 1e16), (bias, 2.1e30 * 2**-24 * 3**0.5), (conv, 2e23)):
        assert 1 <= norms.sq_norms.sqrt().item() <= most
