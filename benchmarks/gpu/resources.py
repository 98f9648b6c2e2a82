"""What a compiled kernel uses, and how compilers say it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

NVIDIA_ARCHITECTURES = (80, 90, 100)

# Bytes that one block may have, when it asks for more than the usual 48 KiB: CUDA's programming
# guide, compute capabilities; CDNA 3's local data share.
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}

Verdict = Literal[
    "ok", "spill", "too much shared memory", "compile error", "not covered", "no kernel"
]


@dataclass(frozen=True)
class Compiled:
    """One kernel, in one configuration, for one target.

    registers: for each thread.
    spill_stores, spill_loads: bytes for each thread on NVIDIA; on AMD the numbers of spilled
        vector and scalar registers.
    bytes_per_element: DRAM traffic that the kernel declares; None where it declares none.
    message: what the compiler said, for a verdict that is not "ok".
    """

    kernel: str
    configuration: str
    target: str
    verdict: Verdict
    registers: int | None = None
    shared_bytes: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    bytes_per_element: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Usage:
    """Registers, shared memory and spills of one entry function."""

    registers: int
    shared_bytes: int
    spill_stores: int
    spill_loads: int

    def verdict(self, target: str) -> Verdict:
        """Return whether the kernel can be launched on ``target`` and spills nothing."""
        if self.shared_bytes > SHARED_BYTES[target]:
            return "too much shared memory"
        return "spill" if self.spill_stores or self.spill_loads else "ok"


def from_ptxas(log: str) -> dict[str, Usage]:
    """Return the usage of every entry function that ``ptxas -v`` reports, by mangled name."""
    usages = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.split("'", 1)[0]
        shared = re.search(r"(\d+) bytes smem", part)
        usages[name] = Usage(
            registers=_number(r"Used (\d+) registers", part),
            shared_bytes=int(shared.group(1)) if shared else 0,
            spill_stores=_number(r"(\d+) bytes spill stores", part),
            spill_loads=_number(r"(\d+) bytes spill loads", part),
        )
    return usages


def from_amdgcn(assembly: str) -> Usage:
    """Return the usage of the one kernel in AMD assembly, from its metadata."""
    return Usage(
        registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
        shared_bytes=_number(r"\.group_segment_fixed_size:\s+(\d+)", assembly),
        spill_stores=_number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
        spill_loads=_number(r"\.sgpr_spill_count:\s+(\d+)", assembly),
    )


def _number(pattern: str, text: str) -> int:
    """Return the number that ``pattern`` finds; an absent one must not pass for zero spills."""
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"the compiler's report has no {pattern!r}:\n{text[:2000]}")
    return int(match.group(1))
