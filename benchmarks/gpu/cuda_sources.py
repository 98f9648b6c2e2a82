"""Compile the CUDA sources with nvcc; they need no torch and no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.resources import NVIDIA_ARCHITECTURES, Compiled, from_ptxas


def nvcc_version() -> str | None:
    """Return the version of nvcc, or None if there is none on PATH."""
    if shutil.which("nvcc") is None:
        return None
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else text.strip().splitlines()[-1]


def sources(folder: Path) -> list[Path]:
    """Return the ``.cu`` files below ``folder``."""
    return sorted(folder.rglob("*.cu"))


def check(folder: Path, include: list[str]) -> Iterator[Compiled]:
    """Compile every ``.cu`` below ``folder`` for every NVIDIA target; yield what came of it."""
    tasks = [(path, arch) for path in sources(folder) for arch in NVIDIA_ARCHITECTURES]
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda task: _compile(task[0], task[1], folder, include), tasks)
        for kernels in compiled:
            yield from kernels


def _compile(path: Path, arch: int, folder: Path, include: list[str]) -> list[Compiled]:
    target = f"sm_{arch}"
    name = path.relative_to(folder).as_posix()
    command = ["nvcc", "-std=c++17", "-O3", f"-arch={target}", "-cubin", "-Xptxas=-v"]
    command += [f"-I{path}" for path in [str(folder), *include]]
    with tempfile.TemporaryDirectory() as out:
        command += [str(path), "-o", str(Path(out, "kernel.cubin"))]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        message = run.stderr or run.stdout
        return [Compiled(name, "-", target, "compile error", message=message)]
    usages = from_ptxas(run.stderr)
    if not usages:
        return [Compiled(name, "-", target, "no kernel", message="no __global__ function")]
    return [
        Compiled(
            kernel=_demangled(mangled),
            configuration=name,
            target=target,
            verdict=usage.verdict(target),
            registers=usage.registers,
            shared_bytes=usage.shared_bytes,
            spill_stores=usage.spill_stores,
            spill_loads=usage.spill_loads,
        )
        for mangled, usage in sorted(usages.items())
    ]


def _demangled(name: str) -> str:
    """Return the name of a C++ function as it is written, if the tool that knows is there."""
    if shutil.which("c++filt") is None:
        return name
    run = subprocess.run(["c++filt", "-p", name], capture_output=True, text=True, check=True)
    return run.stdout.strip()
