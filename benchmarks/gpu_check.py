"""Compile every GPU kernel ahead of time and check what it uses: ``make gpu-check``.

Triton kernels in every configuration that their modules declare, for sm_80, sm_90, sm_100 and
gfx942; CUDA sources for the NVIDIA targets. Needs no GPU. Writes ``gpu_static.md`` and ``.json``,
and fails on a compile error, on a register spill, on more shared memory than the target has, and on
a kernel that nothing compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.resources import Compiled

ROOT = Path(__file__).resolve().parent.parent
HEADER = (
    "kernel",
    "configuration",
    "target",
    "registers",
    "shared memory, bytes",
    "spills",
    "bytes per element",
    "verdict",
)
LEGEND = (
    "Spills are bytes stored/loaded by each thread on NVIDIA, and spilled vector/scalar registers "
    "on AMD. Bytes per element are DRAM reads and writes for each element of the main input. "
    "Compiled ahead of time, not run: no GPU was used."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print the table, write it; return 0 if every kernel is in order."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--ops", default="dpkernels.ops", help="package with triton_impl modules")
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc", help="folder with .cu files")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")

    # Only now: what triton does is settled when it is imported.
    from benchmarks import cuda_build
    from benchmarks.gpu import cuda_sources, triton_kernels
    from dpkernels import include_paths

    compiled = list(triton_kernels.check(options.ops))
    versions = triton_kernels.versions()
    notes = [LEGEND]
    nvcc = cuda_sources.nvcc_version()
    sources = cuda_sources.sources(options.csrc)
    if not sources:
        notes.append("CUDA sources: there are none.")
    elif nvcc is None:
        notes.append(f"CUDA sources: {len(sources)} skipped, because nvcc is not on PATH.")
    else:
        versions["nvcc"] = nvcc
        compiled += cuda_sources.check(options.csrc, include_paths())

    compiled.sort(key=lambda c: (c.kernel, c.configuration, c.target))
    options.results.mkdir(parents=True, exist_ok=True)
    _write(options.results, compiled, versions, notes)
    print(_table(compiled))
    # Said, not demanded: the build needs 5.4 GB, which CI must not. Nor is it in the report, whose
    # bytes depend on kernels and tools alone.
    print("\n".join(["", *notes, cuda_build.standing(), ""]))
    failures = [c for c in compiled if c.verdict != "ok"]
    for failure in failures:
        where = f"{failure.kernel} ({failure.configuration}) for {failure.target}"
        print(f"gpu-check: {where}: {failure.verdict}\n{failure.message}", file=sys.stderr)
    print(f"gpu-check: {len(compiled)} compilations, {len(failures)} not in order")
    return 1 if failures else 0


def _cells(compiled: Compiled) -> list[str]:
    spills = "-"
    if compiled.spill_stores is not None:
        spills = f"{compiled.spill_stores}/{compiled.spill_loads}"
    size = compiled.bytes_per_element
    return [
        compiled.kernel,
        compiled.configuration,
        compiled.target,
        "-" if compiled.registers is None else str(compiled.registers),
        "-" if compiled.shared_bytes is None else str(compiled.shared_bytes),
        spills,
        "-" if size is None else f"{size:g}",
        compiled.verdict,
    ]


def _table(compiled: list[Compiled]) -> str:
    """Return a Markdown table with aligned columns."""
    rows = [list(HEADER), *(_cells(c) for c in compiled)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    rows.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def _write(
    folder: Path, compiled: list[Compiled], versions: dict[str, str], notes: list[str]
) -> None:
    """Write the report; the same kernels and tools give the same bytes."""
    tools = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = ["# GPU kernels, compiled ahead of time", "", *notes, "", f"Tools: {tools}.", ""]
    (folder / "gpu_static.md").write_text("\n".join([*text, _table(compiled), ""]))
    report = {"tools": versions, "notes": notes, "kernels": [asdict(c) for c in compiled]}
    (folder / "gpu_static.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
