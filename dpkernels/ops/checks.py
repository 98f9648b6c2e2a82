"""Argument checks that all operations share: memory to be written, numbers to be used.

The memory checks look at addresses, which do not exist while ``torch.compile`` traces; there the
compiled kernels' own checks hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_finite(op: str, name: str, value: float, *, at_least: float | None = None) -> None:
    """Raise ValueError unless ``value`` is finite and, if given, >= ``at_least``."""
    if math.isfinite(value) and (at_least is None or value >= at_least):
        return
    wanted = "a finite number" if at_least is None else f"a finite number >= {at_least:g}"
    raise ValueError(f"{op}: {name} must be {wanted}, got {value}")


def check_writable(op: str, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise unless every output may be written in place and shares no memory with anything else."""
    for tensor in outputs:
        if tensor.requires_grad:
            raise ValueError(
                f"{op}: {name} requires grad and is read-only here; pass {name}.detach(), or a "
                "buffer that does not require grad"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{op}: {name} is an inference tensor and is read-only here; allocate it outside "
                "torch.inference_mode()"
            )
    if torch.compiler.is_compiling():
        return
    spans = []
    for tensor in outputs:
        span = _span(tensor)
        if tensor.nbytes > span[1] - span[0]:
            raise ValueError(
                f"{op}: {name} of shape {list(tensor.shape)} has several elements at one address "
                f"(strides {list(tensor.stride())}); pass a buffer of its own, e.g. {name}.clone()"
            )
        spans.append((*span, True))
    spans += [(*_span(tensor), False) for tensor in inputs]
    if _overlap(spans):
        raise ValueError(
            f"{op}: {name} shares memory with an input or with itself; pass buffers of their own"
        )


def _overlap(spans: list[tuple[int, int, bool]]) -> bool:
    """Return whether an address range (start, end, written) that is written meets another one."""
    written_until = any_until = 0
    for start, end, written in sorted(spans):
        if start == end:
            continue
        if start < written_until or (written and start < any_until):
            return True
        any_until = max(any_until, end)
        if written:
            written_until = max(written_until, end)
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of ``tensor`` and the first one behind it."""
    start = tensor.data_ptr()
    if tensor.is_contiguous() or tensor.numel() == 0:
        return start, start + tensor.nbytes
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)
    return start, start + elements * tensor.element_size()
