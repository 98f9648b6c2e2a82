"""``gpu-check`` passes on the tree, and fails, with the names, on what it is there to find."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.resources import from_amdgcn, from_ptxas

ROOT = Path(__file__).resolve().parent.parent
CUDA_SOURCES = Path(__file__).resolve().parent / "gpu"
NVIDIA = {"sm_80", "sm_90", "sm_100"}

TRITON_MODULE = '''
import triton
import triton.language as tl

from dpkernels.ops.ahead_of_time import AheadOfTimeCase


@triton.jit
def double(x):
    return x + x


@triton.jit
def product_kernel(x, N: tl.constexpr):
    """Keep two N x N operands in shared memory."""
    at = x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(at)
    tl.store(at, tl.dot(a, tl.trans(a)))


@triton.jit
def double_kernel(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, double(tl.load(at)))


@triton.jit
def scale_kernel(x, N: tl.constexpr):
    """Hold N numbers from before their sum to after it."""
    at = x + tl.arange(0, N)
    values = tl.load(at)
    tl.store(at, values * tl.sum(values, 0))


@triton.jit
def broken_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), no_such_name)


def ahead_of_time_cases():
    return [
        AheadOfTimeCase(kernel, "only", {"x": "*fp32"}, {"N": n}, 16, 8)
        for kernel, n in CASES
    ]
'''


def gpu_check(folder: Path, *arguments: str, path: str | None = None):
    """Run the check in a process of its own, where Triton is not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    if path is not None:
        environment["PATH"] = path
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--results", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def kernels(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "gpu_static.json").read_text())["kernels"]


def triton_package(folder: Path, cases: str) -> list[str]:
    """Write a package of kernels with these cases, and return the arguments that check it."""
    room = folder / "some_ops" / "room"
    room.mkdir(parents=True)
    (room.parent / "__init__.py").touch()
    (room / "__init__.py").touch()
    (room / "triton_impl.py").write_text(f"{TRITON_MODULE}\n\nCASES = {cases}\n")
    (folder / "csrc").mkdir()
    return ["--ops", "some_ops", "--csrc", str(folder / "csrc")]


def cuda_package(folder: Path, *names: str) -> list[str]:
    """Copy CUDA sources into a folder, and return the arguments that check them alone."""
    (folder / "no_ops").mkdir()
    (folder / "no_ops" / "__init__.py").touch()
    (folder / "csrc").mkdir()
    for name in names:
        shutil.copy(CUDA_SOURCES / name, folder / "csrc" / name)
    return ["--ops", "no_ops", "--csrc", str(folder / "csrc")]


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
EVERY_CASE = "[(double_kernel, 16), (scale_kernel, 16), (product_kernel, 16), (broken_kernel, 16)]"


def test_the_committed_report_is_of_this_tree_and_finds_it_in_order() -> None:
    """``make gpu-check`` itself compiles everything; it is not done twice in every run."""
    report = json.loads((ROOT / "benchmarks" / "results" / "gpu_static.json").read_text())
    assert all(k["verdict"] == "ok" for k in report["kernels"])
    found = {(k["kernel"], k["configuration"], k["target"]) for k in report["kernels"]}
    code = "from benchmarks.gpu.triton_kernels import names; print(names('dpkernels.ops'))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=True,
    )
    wanted = ast.literal_eval(run.stdout)
    csrc = ROOT / "csrc"
    sources = {path.relative_to(csrc).as_posix() for path in csrc.rglob("*.cu")}
    of_triton = {name for name in found if not name[1].endswith(".cu")}
    assert of_triton == wanted, "run make gpu-check and commit benchmarks/results/gpu_static.*"
    assert {name[1] for name in found - of_triton} == sources


@pytest.mark.parametrize("room", ["noise"])
def test_a_room_of_the_tree_passes(tmp_path: Path, room: str) -> None:
    (tmp_path / "some_ops" / room).mkdir(parents=True)
    (tmp_path / "some_ops" / "__init__.py").touch()
    (tmp_path / "some_ops" / room / "__init__.py").touch()
    module = (
        f"from dpkernels.ops.{room}.triton_impl import ahead_of_time_cases as ahead_of_time_cases\n"
    )
    (tmp_path / "some_ops" / room / "triton_impl.py").write_text(module)
    (tmp_path / "csrc").mkdir()
    run = gpu_check(tmp_path, "--ops", "some_ops", "--csrc", str(tmp_path / "csrc"))
    assert run.returncode == 0, run.stderr
    found = kernels(tmp_path)
    assert {k["target"] for k in found} == {*NVIDIA, "gfx942"}
    assert all(k["verdict"] == "ok" and k["spill_stores"] == k["spill_loads"] == 0 for k in found)


def test_a_kernel_without_a_case_fails(tmp_path: Path) -> None:
    run = gpu_check(tmp_path, *triton_package(tmp_path, "[(double_kernel, 16)]"))
    assert run.returncode == 1
    uncovered = {k["kernel"] for k in kernels(tmp_path) if k["verdict"] == "not covered"}
    assert uncovered == {"room.scale_kernel", "room.product_kernel", "room.broken_kernel"}
    assert "broken_kernel" in run.stderr and "ahead_of_time_cases" in run.stderr


def test_a_kernel_that_does_not_compile_fails_on_every_target(tmp_path: Path) -> None:
    run = gpu_check(tmp_path, *triton_package(tmp_path, EVERY_CASE))
    assert run.returncode == 1
    failed = {(k["kernel"], k["target"]) for k in kernels(tmp_path) if k["verdict"] != "ok"}
    assert failed == {("room.broken_kernel", target) for target in (*NVIDIA, "gfx942")}
    assert "broken_kernel (only) for sm_90: compile error" in run.stderr
    assert "no_such_name" in run.stderr


def test_a_kernel_that_spills_fails(tmp_path: Path) -> None:
    # 16 warps leave a thread 128 registers, and it would hold 128 numbers (256 on NVIDIA).
    cases = EVERY_CASE.replace("(scale_kernel, 16)", "(scale_kernel, 131072)")
    run = gpu_check(tmp_path, *triton_package(tmp_path, cases))
    assert run.returncode == 1
    spilled = [k for k in kernels(tmp_path) if k["verdict"] == "spill"]
    assert {k["kernel"] for k in spilled} == {"room.scale_kernel"}
    assert {k["target"] for k in spilled} == {*NVIDIA, "gfx942"}
    assert "scale_kernel (only) for gfx942: spill" in run.stderr


def test_a_kernel_that_needs_more_shared_memory_than_there_is_fails(tmp_path: Path) -> None:
    cases = "[(double_kernel, 16), (scale_kernel, 16), (product_kernel, 256)]"
    run = gpu_check(tmp_path, *triton_package(tmp_path, cases))
    assert run.returncode == 1
    refused = [k for k in kernels(tmp_path) if k["verdict"] == "too much shared memory"]
    assert {k["kernel"] for k in refused} == {"room.product_kernel"}
    # On sm_90 one of the operands comes from registers.
    assert {k["target"] for k in refused} == {"sm_80", "sm_100", "gfx942"}
    assert "product_kernel (only) for sm_80: too much shared memory" in run.stderr


@needs_nvcc
def test_a_cuda_source_is_compiled_for_every_nvidia_target(tmp_path: Path) -> None:
    run = gpu_check(tmp_path, *cuda_package(tmp_path, "noise.cu"))
    assert run.returncode == 0, run.stderr
    found = kernels(tmp_path)
    assert {k["target"] for k in found} == NVIDIA
    assert all("draw_normals" in str(k["kernel"]) and k["registers"] for k in found)


@needs_nvcc
def test_cuda_sources_that_spill_or_do_not_compile_fail(tmp_path: Path) -> None:
    run = gpu_check(tmp_path, *cuda_package(tmp_path, "noise.cu", "broken.cu", "spilling.cu"))
    assert run.returncode == 1
    verdicts = {(k["kernel"], k["target"]): k["verdict"] for k in kernels(tmp_path)}
    for target in NVIDIA:
        assert verdicts[("broken.cu", target)] == "compile error"
        assert verdicts[("hold_too_much", target)] == "spill"
        assert verdicts[("draw_normals", target)] == "ok"
        assert f"hold_too_much (spilling.cu) for {target}: spill" in run.stderr
    assert "no_such_function" in run.stderr


def test_without_nvcc_the_cuda_sources_are_reported_as_skipped(tmp_path: Path) -> None:
    run = gpu_check(tmp_path, *cuda_package(tmp_path, "noise.cu", "broken.cu"), path=os.devnull)
    assert run.returncode == 0, run.stderr
    assert "2 skipped, because nvcc is not on PATH" in run.stdout
    assert "2 skipped" in (tmp_path / "gpu_static.md").read_text()


def test_the_interpreter_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--results", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 2 and "TRITON_INTERPRET" in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parse", [from_amdgcn, lambda text: from_ptxas(text)["k"]])
def test_a_report_without_spill_counts_is_not_taken_for_no_spills(parse) -> None:
    with pytest.raises(RuntimeError, match="has no"):
        parse("Compiling entry function 'k' for 'sm_80'\nUsed 8 registers\n.vgpr_count: 8\n")
