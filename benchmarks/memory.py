"""Peak memory that one call takes on top of what it was given.

On the CPU two instruments look, and their readings are kept apart because neither is the truth.
PyTorch's profiler sees every tensor to the byte, but no scratch memory of BLAS or of a C++ kernel:
it may read too low. The system's high-water mark of resident memory sees whatever was touched, to
the page, but also what malloc keeps after a free: it may read too high for a form that allocates.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on top of what was there: of tensors, and resident (None where nobody says)."""

    allocated: int
    resident: int | None

    @property
    def at_most(self) -> int:
        """The larger reading: what to hold a form to."""
        return max(self.allocated, self.resident or 0)

    @property
    def at_least(self) -> int:
        """The smaller reading: what to compare another form with."""
        return self.allocated if self.resident is None else min(self.allocated, self.resident)


def peak_extra_memory(call: Call, device: torch.device) -> PeakMemory:
    """Return the peak during ``call``, which has been warmed up before."""
    if device.type == "cuda":
        return PeakMemory(_cuda_peak(call), None)
    return PeakMemory(_allocated_peak(call), _resident_rise(call))


def _cuda_peak(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _allocated_peak(call: Call) -> int:
    # Kineto writes two lines to stderr for every profile unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    kineto = profiled.profiler
    assert kineto is not None and kineto.kineto_results is not None
    memory = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    running = peak = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak


def _resident_rise(call: Call) -> int | None:
    """Return how far resident memory rose during ``call``; None where the system does not say."""
    if not sys.platform.startswith("linux") or not _CLEAR_REFS.exists():
        return None
    # Freed memory that malloc keeps is resident already: hand it back, or its reuse goes unseen.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        _CLEAR_REFS.write_text("5")  # sets the high-water mark back to what is resident now
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
