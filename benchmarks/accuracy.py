"""Whether outputs are right: as accurate as plain PyTorch in the same dtype (see DESIGN)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.registry import Case, Inputs, Outputs
from benchmarks.results import Measurement


class Judge:
    """Decides whether outputs are right; knows the truth and the error that is allowed."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        self._inputs = inputs
        self._truth = case.truth(inputs)
        first = case.plain[0]
        same_dtype = case.same_dtype or (lambda inputs: first.run(*first.arguments(inputs)))
        self.allowed = allowed_error(same_dtype(inputs), self._truth)
        self.allowed += case.raised * max(_largest(exact) for exact in self._truth)

    def judge(self, outputs: Outputs, found: Measurement) -> None:
        """Write the error, and a mismatch if it is one, into ``found``."""
        if found.kind != "ours" and self._case.check_plain is not None:
            found.reason = self._case.check_plain(self._inputs, outputs) or ""
        else:
            error = largest_error(outputs, self._truth)
            if math.isfinite(error):
                found.error = error
            if error > self.allowed:
                found.reason = f"error {error:.3g}, allowed {self.allowed:.3g}"
        if found.reason:
            found.status = "mismatch"


def largest_error(outputs: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest absolute error; infinity for wrong shapes or a NaN."""
    if [t.shape for t in outputs] != [t.shape for t in truth]:
        return math.inf
    errors = [_largest(out.double() - exact) for out, exact in zip(outputs, truth, strict=True)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def allowed_error(plain: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return twice the error of ``plain`` plus one ulp (of its dtype) of the output's scale.

    Raises ValueError if ``plain`` is itself no result: nothing could be compared with it.
    """
    error = largest_error(plain, truth)
    if not math.isfinite(error):
        raise ValueError(
            "allowed_error: the plain PyTorch form has other shapes or a non-finite value"
        )
    scale = max(_largest(exact) for exact in truth)
    return 2 * error + torch.finfo(plain[0].dtype).eps * scale


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
