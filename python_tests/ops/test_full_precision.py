"""Products whose rounding is bounded take no TF32 on CUDA, whatever the process has allowed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpkernels.ops.clip import reference as clip
from dpkernels.ops.full_precision import full_precision
from dpkernels.ops.ghost import conv_norms
from dpkernels.ops.glm import reference as glm

PRODUCTS = ("mm", "mv", "bmm", "convolution_backward")


def settings() -> tuple[str, str]:
    """Return what cuBLAS and cuDNN's convolutions may take."""
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


@pytest.fixture(params=["tf32", "ieee"])
def allowed(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    before = settings()
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    matmul.fp32_precision = conv.fp32_precision = request.param
    yield settings()
    matmul.fp32_precision, conv.fp32_precision = before


class Products(TorchDispatchMode):
    """Takes down the settings under which every float32 product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS and args[0].dtype == torch.float32:
            self.seen.append(settings())
        return func(*args, **(kwargs or {}))


def rows() -> None:
    clip.weighted_row_sum_([torch.empty(5)], [torch.ones(3, 5)], torch.ones(1, 3), False)


def convolution(size: int) -> None:
    x, d = torch.ones(2, 3, size, size), torch.ones(2, 40, size - 2, size - 2)
    # More weights than pixels: gradients are not kept, the sum is a convolution's gradient.
    norms = conv_norms(x, d, kernel_size=3, formula="rank_one" if size == 3 else "gram")
    norms.weighted_sum(torch.ones(2))


def records() -> None:
    x, labels, spans = torch.ones(6, 3), torch.zeros(6).long(), torch.tensor([[0, 6]])
    gradients, hessians = torch.empty(1, 2, 3), torch.empty(1, 6, 6)
    theta = torch.zeros(1, 2, 3)
    glm.glm_clipped_sums_(gradients, hessians, x, labels, spans, 6, theta, 1.0, 1.0)


def covariance() -> None:
    glm.glm_feature_covariance(torch.ones(6, 3), torch.tensor([[0, 6]]), 6, 1.0)


@pytest.mark.parametrize(
    "run", [rows, lambda: convolution(3), lambda: convolution(4), records, covariance]
)
def test_sums_are_products_in_full_precision(
    run: Any, allowed: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tensors of this machine pass for a GPU's.
    def on_cuda(like: Tensor) -> Any:
        return full_precision(SimpleNamespace(is_cuda=True))  # type: ignore[arg-type]

    for module in ("ghost.conv", "clip.reference", "glm.reference"):
        monkeypatch.setattr(f"dpkernels.ops.{module}.full_precision", on_cuda)
    with Products() as products:
        run()
    assert products.seen and set(products.seen) == {("ieee", "ieee")}
    assert settings() == allowed


def test_settings_are_put_back_after_an_error(allowed: tuple[str, str]) -> None:
    cuda: Any = SimpleNamespace(is_cuda=True)
    with pytest.raises(RuntimeError, match="shapes"), full_precision(cuda):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert settings() == allowed


def test_nothing_changes_for_tensors_of_the_cpu(allowed: tuple[str, str]) -> None:
    with full_precision(torch.ones(1)):
        assert settings() == allowed
