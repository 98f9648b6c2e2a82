"""Compile the Triton kernels of a package in every configuration that their modules declare."""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.gpu.resources import (
    NVIDIA_ARCHITECTURES,
    Compiled,
    Usage,
    from_amdgcn,
    from_ptxas,
)
from dpkernels.ops.ahead_of_time import COMPILE_OPTIONS, AheadOfTimeCase

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in NVIDIA_ARCHITECTURES}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)


def modules(package: str) -> list[str]:
    """Return the names of the ``triton_impl`` modules in the folders of ``package``."""
    folders = importlib.import_module(package).__path__
    files = (path for folder in folders for path in Path(folder).glob("*/triton_impl.py"))
    return sorted(f"{package}.{path.parent.name}.triton_impl" for path in files)


def check(package: str) -> Iterator[Compiled]:
    """Compile every case of every module for every target; yield what came of it."""
    tasks = []
    for name in modules(package):
        module = importlib.import_module(name)
        yield from _uncovered(module)
        count = len(_cases(name))
        tasks += [(name, index, target) for index in range(count) for target in TARGETS]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from pool.map(_compile_task, tasks, chunksize=4)


def names(package: str) -> set[tuple[str, str, str]]:
    """Return kernel, configuration and target of all that ``check`` compiles."""
    cases = [(name, case) for name in modules(package) for case in _cases(name)]
    return {(_title(m, c.kernel), c.configuration, t) for m, c in cases for t in TARGETS}


def versions() -> dict[str, str]:
    """Return the versions of Triton and of its assemblers."""
    found = {"triton": triton.__version__}
    for arch in NVIDIA_ARCHITECTURES:
        found[f"ptxas sm_{arch}"] = get_ptxas(arch).version
    return found


def _title(module: str, kernel: JITFunction) -> str:
    """Return the kernel's name with its room's: rooms do not ask each other for names."""
    return f"{module.split('.')[-2]}.{kernel.__name__}"


def _cases(module: str) -> list[AheadOfTimeCase]:
    cases: list[AheadOfTimeCase] = importlib.import_module(module).ahead_of_time_cases()
    return cases


def _kernels_beside(module: ModuleType) -> dict[str, JITFunction]:
    """Return the jitted functions defined in the ``triton_*`` modules beside ``module``."""
    assert module.__file__ is not None
    found = {}
    for path in Path(module.__file__).parent.glob("triton_*.py"):
        sibling = importlib.import_module(f"{module.__package__}.{path.stem}")
        for name, value in vars(sibling).items():
            if isinstance(value, JITFunction) and value.fn.__module__ == sibling.__name__:
                found[name] = value
    return found


def _uncovered(module: ModuleType) -> Iterator[Compiled]:
    """Yield a failure for each kernel that no case compiles, neither directly nor as a callee."""
    kernels = _kernels_beside(module)
    reached: set[str] = set()
    pending = [case.kernel.__name__ for case in module.ahead_of_time_cases()]
    while pending:
        name = pending.pop()
        if name in kernels and name not in reached:
            reached.add(name)
            pending += kernels[name].fn.__code__.co_names
    for name in sorted(kernels.keys() - reached):
        yield Compiled(
            kernel=_title(module.__name__, kernels[name]),
            configuration="-",
            target="-",
            verdict="not covered",
            message=f"{module.__name__}.ahead_of_time_cases() has no case that compiles {name}",
        )


def _compile_task(task: tuple[str, int, str]) -> Compiled:
    name, index, target = task
    case = _cases(name)[index]
    common: dict[str, Any] = {
        "kernel": _title(name, case.kernel),
        "configuration": case.configuration,
    }
    try:
        usage = _compile(case, TARGETS[target])
    except Exception as error:  # whatever the compiler raises is a line of the report
        return Compiled(**common, target=target, verdict="compile error", message=str(error))
    return Compiled(
        **common,
        target=target,
        verdict=usage.verdict(target),
        registers=usage.registers,
        shared_bytes=usage.shared_bytes,
        spill_stores=usage.spill_stores,
        spill_loads=usage.spill_loads,
        bytes_per_element=case.bytes_per_element,
    )


def _compile(case: AheadOfTimeCase, target: GPUTarget) -> Usage:
    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(case.kernel, signature, dict(case.constexprs), aligned)
    options = {"num_warps": case.num_warps, **COMPILE_OPTIONS}
    kernel = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        usage = from_amdgcn(kernel.asm["amdgcn"])
    else:
        usage = _assemble(kernel.asm["ptx"], target.arch)
    # Triton asks for shared memory at launch, so the binary does not show it.
    shared = usage.shared_bytes + kernel.metadata.shared
    return Usage(usage.registers, shared, usage.spill_stores, usage.spill_loads)


def _assemble(ptx: str, arch: int) -> Usage:
    """Assemble PTX as Triton does, but keep the assembler's report."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={sm_arch_from_capability(arch)}", str(source)]
        command += ["-o", str(Path(folder, "kernel.cubin"))]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr)
    (usage,) = from_ptxas(run.stderr).values()
    return usage
