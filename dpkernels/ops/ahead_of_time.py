"""What a Triton module declares about its kernels so that they can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# FMA contraction is asked for by name: Triton's default for it changes between releases.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class AheadOfTimeCase:
    """One configuration in which the launch code may start one kernel.

    kernel: the ``@triton.jit`` function.
    configuration: what tells it from the kernel's other cases, such as ``float32 4x1024``.
    signature: Triton type of every argument that is not a constexpr, ``*fp32`` or ``i64``.
    constexprs: value of every constexpr argument.
    aligned: arguments that are multiples of 16 (pointers: of 16 bytes). Triton compiles such
        calls apart, with wide loads.
    num_warps: warps for each program, as it is launched.
    bytes_per_element: DRAM bytes read and written for each element of the main input.
    """

    kernel: Any
    configuration: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, int]
    num_warps: int
    bytes_per_element: float
    aligned: tuple[str, ...] = field(default=())
