"""Where the static check finds the Triton kernels of every layer kind."""

from __future__ import annotations

from dpkernels.ops.ahead_of_time import AheadOfTimeCase
from dpkernels.ops.ghost import triton_conv, triton_embedding, triton_linear, triton_scale_shift


def ahead_of_time_cases() -> list[AheadOfTimeCase]:
    """Return every configuration in which the layers launch their kernels."""
    layers = (triton_conv, triton_embedding, triton_linear, triton_scale_shift)
    return [case for layer in layers for case in layer.ahead_of_time_cases()]
