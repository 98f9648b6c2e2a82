"""What the Triton launchers of this room share: how much one program takes, and declared cases.

No GPU was at hand: nothing here was timed. Blocks follow from bytes in flight and from the static
report (``make gpu-check``): no spills on any target.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase

WARPS = 4
# Eight elements a thread: of the step's three streams that is 96 bytes in flight a thread, and 16
# warps of an SM then have 48 KB; an H100 needs about 20 KB (3.3 TB/s x 800 ns / 132).
BLOCK = 1024
_PROGRAMS_PER_SM = 4
# Without a GPU (interpreter): small, so that tests see the work split.
_INTERPRETED_SMS = 1


@functools.cache
def programs_that_fill(device: torch.device) -> int:
    """Return how many programs fill the GPU."""
    if device.type != "cuda":
        return _INTERPRETED_SMS * _PROGRAMS_PER_SM
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM


def launch_arguments(warps: int = WARPS, **blocks: Any) -> dict[str, Any]:
    """Return the launch arguments of a kernel: its blocks, warps and compiler options."""
    return {**blocks, "num_warps": warps, **COMPILE_OPTIONS}


def vector_of(*tensors: Tensor) -> int:
    """Return how many elements a thread can load at once from all of these, or one.

    16 bytes of the widest: eight bfloat16 beside eight float32 spill on sm_80 (static report).
    """
    vector = min(16 // x.element_size() for x in tensors)
    wide = all(
        x.data_ptr() % 16 == 0
        and x.shape[-1] % vector == 0
        and (x.dim() < 2 or x.stride(0) % vector == 0)
        for x in tensors
    )
    return vector if wide else 1


def split(n: int, block: int, most: int) -> tuple[int, int]:
    """Return into how many programs n elements are split, at most so many, and blocks of each."""
    blocks = triton.cdiv(n, block)
    each = max(1, triton.cdiv(blocks, max(1, most)))
    return triton.cdiv(blocks, each), each


def variants(
    kernel: Any,
    name: str,
    signature: dict[str, str],
    constexprs: dict[str, int],
    vector: int,
    size: float,
    aligned: tuple[str, ...],
    warps: int = WARPS,
) -> list[AheadOfTimeCase]:
    """Return a kernel's cases: whole vectors, aligned elements, and elements as they come."""
    return [
        AheadOfTimeCase(
            kernel=kernel,
            configuration=f"{name} vector {unit}" + ("" if is_aligned else " unaligned"),
            signature=signature,
            constexprs={"VECTOR": unit, **constexprs},
            num_warps=warps,
            bytes_per_element=size,
            aligned=aligned if is_aligned else (),
        )
        for unit, is_aligned in ((vector, True), (1, True), (1, False))
    ]
