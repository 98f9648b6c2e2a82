"""Kronecker preconditioning: apply U_G X U_A, and estimate what U_G and U_A are made from.

``apply_factor`` puts one side onto vectors, ``apply_kron`` both sides onto matrices; a side is a
``Full``, ``Diagonal`` or ``LowRank`` factor (``dpkernels.ops.factor``), or None for the identity.

``second_moment`` and its kin estimate A = E[a a^T] and G = E[d d^T] of a layer, and
``SecondMoment`` averages them over batches. The preconditioner must never see the batch that it
preconditions: feed these with synthetic probes, public data or released statistics.
"""

from __future__ import annotations

from dpkernels.ops.factor import Diagonal, Factor, Full, LowRank
from dpkernels.ops.kron.apply import apply_factor, apply_kron
from dpkernels.ops.kron.convolution import mean_patches
from dpkernels.ops.kron.diagonal import scale_and_shift_moments, token_frequencies
from dpkernels.ops.kron.inputs import DTYPES
from dpkernels.ops.kron.moments import conv_second_moment, second_moment
from dpkernels.ops.kron.running import SecondMoment

__all__ = [
    "DTYPES",
    "Diagonal",
    "Factor",
    "Full",
    "LowRank",
    "SecondMoment",
    "apply_factor",
    "apply_kron",
    "conv_second_moment",
    "mean_patches",
    "scale_and_shift_moments",
    "second_moment",
    "token_frequencies",
]
