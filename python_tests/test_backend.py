"""Which backend serves a call: by default, by request, and when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import dpkernels
from dpkernels import BackendUnavailable, backend, explain, use_backend
from dpkernels.ops import clip
from dpkernels.ops.noise import add_gaussian_noise_
from python_tests.conftest import instruction_sets

PACKAGE = Path(dpkernels.__file__).parent
OPERATIONS = (
    "row_sq_norms",
    "clip_factors",
    "weighted_row_sum_",
    "clip_and_sum_",
    "add_gaussian_noise_",
)
GRADS = torch.ones(3, 4)


# An editable install answers for every module of the package: it would lend a copy its extension.
FROM_PATH_ONLY = (
    "import sys\n"
    "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
)


def python(code: str, path: Path = PACKAGE.parent, **environment: str) -> str:
    """Run ``code`` in a new interpreter that finds the package in ``path``; return what it says."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", FROM_PATH_ONLY + code],
        env={**inherited, "PYTHONPATH": str(path), **environment},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture
def without_extension(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package that was installed without ``_C``."""
    leave_out = shutil.ignore_patterns("_C*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "dpkernels", ignore=leave_out)
    return tmp_path


def test_every_operation_is_registered() -> None:
    assert set(OPERATIONS) <= set(backend.operations())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_extension_serves_the_cpu_by_default(operation: str) -> None:
    wanted = "reference" if backend.extension is None else "cpp"
    explanation = explain(operation)
    assert explanation.chosen == wanted
    assert set(explanation.reasons) == set(backend.BACKENDS) - {wanted}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_serves_gpus_and_the_reference_everything_else(operation: str) -> None:
    assert explain(operation, "cuda").chosen in ("triton", "cuda")
    assert explain(operation, "meta").chosen == "reference"
    assert "these are on meta" in explain(operation, "meta").reasons["triton"]


def test_an_explanation_reads_well() -> None:
    text = str(explain("clip_and_sum_", "cuda", torch.float16))
    lines = text.splitlines()
    assert lines[0] == "clip_and_sum_ on cuda, torch.float16: triton"
    assert any(line.startswith("  not cpp: ") for line in lines[1:])
    assert "  not reference: 'triton' comes first on cuda" in lines
    assert "not one of float32, float64" in str(explain("add_gaussian_noise_", dtype=torch.half))


def test_an_explanation_tells_what_was_asked_for() -> None:
    with use_backend("cuda"):
        explanation = explain("clip_and_sum_")
    assert explanation.chosen is None
    assert str(explanation).startswith("clip_and_sum_ on cpu, torch.float32: nothing")
    assert explanation.reasons["reference"] == "'cuda' was asked for by name"
    assert "'cuda' was asked" not in explanation.reasons["cuda"]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"explain: no operation 'clip'; there are row_sq_norms"):
        explain("clip")
    with (
        pytest.raises(ValueError, match="use_backend: no backend 'gpu'; there are reference, cpp"),
        use_backend("gpu"),
    ):
        pass
    with use_backend("reference"), pytest.raises(ValueError, match="no backend"):
        use_backend("fast").__enter__()
    said = python("import dpkernels", DPKERNELS_BACKEND="fast")
    assert "ValueError: DPKERNELS_BACKEND: no backend 'fast'; there are reference, cpp" in said


def test_a_request_that_cannot_be_served_raises_before_anything_is_written() -> None:
    out = torch.full((4,), 7.0)
    with use_backend("cuda"):
        with pytest.raises(
            BackendUnavailable, match="clip_and_sum_: backend 'cuda' was asked for and cannot serve"
        ):
            clip.clip_and_sum(GRADS, 1.0, out=out)
        with pytest.raises(BackendUnavailable, match=r"torch\.float32 tensors on cpu: "):
            add_gaussian_noise_(out, 1.0, 0, 0)
    assert (out == 7.0).all()


def test_blocks_nest_and_end_with_an_exception() -> None:
    def chosen() -> str | None:
        return explain("clip_and_sum_").chosen

    default = chosen()
    with use_backend("triton"):
        assert chosen() == "triton"
        with use_backend("reference"):
            assert chosen() == "reference"
        assert chosen() == "triton"
    assert chosen() == default
    with pytest.raises(KeyError), use_backend("triton"):
        raise KeyError
    assert chosen() == default


def test_a_block_holds_in_its_own_thread_only() -> None:
    seen: list[str | None] = []

    def look() -> None:
        seen.append(explain("clip_and_sum_").chosen)

    default = explain("clip_and_sum_").chosen
    with use_backend("triton"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [default]


def test_the_backend_that_was_asked_for_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    operation = backend._operations["clip_and_sum_"]
    # What earlier calls found is not to be found again.
    monkeypatch.setitem(operation.__dict__, "served", {})
    for name in ("reference", "triton", "overload"):
        implementation = getattr(operation, name)

        def spy(*args: object, name: str = name, call: object = implementation) -> object:
            ran.append(name)
            assert callable(call)
            return call(*args)

        # A frozen dataclass keeps its fields where assignment does not reach them.
        monkeypatch.setitem(operation.__dict__, name, spy)
    with use_backend("reference"):
        clip.clip_and_sum(GRADS, 1.0)
    with use_backend("triton"):
        clip.clip_and_sum(GRADS, 1.0)
    clip.clip_and_sum(GRADS, 1.0)
    assert ran == ["reference", "triton", "reference" if backend.extension is None else "overload"]


def test_the_environment_variable_holds_for_the_process_and_a_block_wins() -> None:
    code = (
        "import dpkernels\n"
        "print(dpkernels.explain('clip_and_sum_').chosen)\n"
        "with dpkernels.use_backend('triton'): print(dpkernels.explain('clip_and_sum_').chosen)\n"
        "print(dpkernels.explain('clip_and_sum_', 'cuda').chosen)\n"
    )
    said = python(code, DPKERNELS_BACKEND="reference", TRITON_INTERPRET="1")
    assert said.split() == ["reference", "triton", "reference"]
    said = python(code, DPKERNELS_BACKEND="", TRITON_INTERPRET="1")
    assert said.split()[0] == explain("clip_and_sum_").chosen


def test_the_environment_variable_is_not_ignored_where_it_cannot_be_served() -> None:
    code = "import torch, dpkernels; dpkernels.ops.clip.row_sq_norms(torch.ones(2, 2))"
    said = python(code, DPKERNELS_BACKEND="triton")
    assert "BackendUnavailable: row_sq_norms: backend 'triton' was asked for" in said
    assert "CPU tensors need TRITON_INTERPRET=1" in said


def test_the_package_works_without_the_extension(without_extension: Path) -> None:
    code = (
        "import torch, dpkernels\n"
        "grads = torch.tensor([[3.0, 4.0], [0.5, 0.0]])\n"
        "result = dpkernels.ops.clip.clip_and_sum(grads, 5.0)\n"
        "dpkernels.ops.noise.add_gaussian_noise_(result.sum, 0.0, 1, 2)\n"
        "print(result.sum.tolist(), dpkernels.explain('clip_and_sum_'))\n"
        "torch.ops.dpkernels.row_sq_norms([grads], False)\n"
        "with dpkernels.use_backend('cpp'): dpkernels.ops.clip.row_sq_norms(grads)\n"
    )
    said = python(code, without_extension)
    assert "[3.5, 4.0] clip_and_sum_ on cpu, torch.float32: reference" in said
    assert "not cpp: dpkernels._C is not built; install again with a C++ compiler" in said
    assert "BackendUnavailable: row_sq_norms: backend 'cpp' was asked for" in said


def test_an_extension_that_does_not_load_is_an_error(without_extension: Path) -> None:
    (without_extension / "dpkernels" / "_C.py").write_text(
        "raise ImportError('undefined symbol: _ZN2at4_ops5emptyE')\n"
    )
    said = python("import dpkernels", without_extension)
    assert "ImportError: dpkernels._C exists but does not load with torch" in said
    assert "undefined symbol: _ZN2at4_ops5emptyE. Build it again for this torch" in said


def test_an_extension_built_for_another_torch_is_an_error(without_extension: Path) -> None:
    (without_extension / "dpkernels" / "_C.py").write_text(
        "def build_config():\n    return {'torch': '1.13.1'}\n"
    )
    said = python("import dpkernels", without_extension)
    assert "it was built for torch 1.13.1. Build it again for this torch" in said


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_is_tested_here(isa: str) -> None:
    if backend.extension is None:
        pytest.skip("dpkernels._C is not built")
    if isa not in instruction_sets():
        with pytest.raises((ValueError, RuntimeError), match=isa):
            backend.extension.set_isa(isa)
        pytest.skip(f"this CPU has no {isa}")
    before = backend.extension.cpu_features()["active"]
    backend.extension.set_isa(isa)
    assert backend.extension.cpu_features()["active"] == isa
    backend.extension.set_isa(before)
