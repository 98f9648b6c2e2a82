"""Float32 products whose operands are not rounded to TF32 on the way.

cuDNN's convolutions take TF32, 10 bits of mantissa, unless they are told not to, and cuBLAS does so
when it is told to. A bound of what a sum rounds counts roundings of float32, 2^-24 each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Forbid TF32 in the products inside, if ``like`` is on a CUDA device; else do nothing.

    The settings are the process's: they are put back at the end, and products that other threads
    start meanwhile are in full precision, too.
    """
    if not like.is_cuda:
        yield
        return
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = products.fp32_precision, convolutions.fp32_precision
    products.fp32_precision = convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision, convolutions.fp32_precision = before
