"""Argument checks that all operations share: memory to be written, numbers to be used.

Addresses do not exist while ``torch.compile`` traces, so the checks that look at them are left to
the compiled kernels there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def check_finite(
    op: str, name: str, value: float, *, at_least: float | None = None, above: float | None = None
) -> None:
    """Raise ValueError unless ``value`` is finite, >= ``at_least`` and > ``above``, if given."""
    low = at_least is not None and value < at_least
    low = low or (above is not None and value <= above)
    if math.isfinite(value) and not low:
        return
    wanted = "" if at_least is None else f" >= {at_least:g}"
    wanted += "" if above is None else f" > {above:g}"
    raise ValueError(f"{op}: {name} must be a finite number{wanted}, got {value}")


def check_writable(op: str, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise unless every output may be written in place and shares no memory with anything else."""
    for tensor in outputs:
        if tensor.requires_grad:
            raise ValueError(
                f"{op}: {name} requires grad and is read-only here; pass {name}.detach(), or a "
                "buffer that does not require grad"
            )
    if torch.compiler.is_compiling():
        return
    for tensor in outputs:
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{op}: {name} is an inference tensor and is read-only here; allocate it outside "
                "torch.inference_mode()"
            )
        if _may_overlap_itself(tensor):
            raise ValueError(
                f"{op}: {name} of shape {list(tensor.shape)} has several elements at one address "
                f"(strides {list(tensor.stride())}); pass a buffer of its own, e.g. {name}.clone()"
            )
    spans = [(*_span(tensor), True) for tensor in outputs]
    spans += [(*_span(tensor), False) for tensor in inputs]
    if _overlap(spans):
        raise ValueError(
            f"{op}: {name} shares memory with an input or with itself (address ranges overlap); "
            "pass buffers of their own"
        )


def _may_overlap_itself(tensor: Tensor) -> bool:
    """Return whether two elements may share an address: a dimension steps inside a smaller one."""
    if tensor.is_contiguous():
        return False
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += (size - 1) * stride
    return False


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
    if isinstance(tensor, FakeTensor):  # has no address
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous() or tensor.numel() == 0:
        return start, start + tensor.nbytes
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in strides)
    return start, start + elements * tensor.element_size()
