"""Sherman-Morrison on GPUs, in Triton: what the operations call, and what is compiled ahead."""

from __future__ import annotations

from dpkernels.ops.ahead_of_time import AheadOfTimeCase
from dpkernels.ops.sherman_morrison.triton_step import sofim_step_, step_cases
from dpkernels.ops.sherman_morrison.triton_window import (
    rank_one_inverse_update_,
    window_cases,
    window_combine_,
    window_gram,
    window_project,
)

__all__ = [
    "ahead_of_time_cases",
    "rank_one_inverse_update_",
    "sofim_step_",
    "window_combine_",
    "window_gram",
    "window_project",
]


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the functions above launch their kernels."""
    return [*step_cases(), *window_cases()]
