"""What setup.py decides to compile and how, and what the compiled module is like."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import cpp_extension

from dpkernels import backend

ROOT = Path(__file__).resolve().parent.parent


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dpkernels_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclass looks its module up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


setup = load_setup()


@pytest.fixture
def extension() -> ModuleType:
    if backend.extension is None:
        pytest.skip("dpkernels._C is not built")
    return backend.extension


@pytest.mark.parametrize(
    ("requested", "compiler", "nvcc", "torch_cuda", "kind"),
    [
        ("auto", "c++", "nvcc", "13.0", "cuda"),
        ("auto", "c++", "nvcc", None, "cpu"),
        ("auto", "c++", None, "13.0", "cpu"),
        ("auto", "c++", None, None, "cpu"),
        ("auto", None, "nvcc", "13.0", "none"),
        ("cpu", "c++", "nvcc", "13.0", "cpu"),
        ("cuda", "c++", "nvcc", "13.0", "cuda"),
        ("none", "c++", "nvcc", "13.0", "none"),
        ("none", None, None, None, "none"),
    ],
)
def test_build_follows_request_and_tools(requested, compiler, nvcc, torch_cuda, kind):
    assert setup.choose_build(requested, compiler, nvcc, torch_cuda).kind == kind


@pytest.mark.parametrize(
    ("requested", "compiler", "nvcc", "torch_cuda", "message"),
    [
        ("cuda", "c++", None, "13.0", "DPKERNELS_BUILD=cuda, but there is no nvcc"),
        ("cuda", "c++", "nvcc", None, "the installed torch is not a CUDA build"),
        ("cuda", None, "nvcc", "13.0", r"there is no C\+\+ compiler"),
        ("cpu", None, None, None, r"DPKERNELS_BUILD=cpu, but there is no C\+\+ compiler"),
        ("gpu", "c++", "nvcc", "13.0", "must be one of auto, cpu, cuda, none, got 'gpu'"),
    ],
)
def test_impossible_build_is_refused_with_the_reason(
    requested, compiler, nvcc, torch_cuda, message
):
    with pytest.raises(setup.BuildError, match=message):
        setup.choose_build(requested, compiler, nvcc, torch_cuda)


def test_missing_compiler_is_said_in_auto(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DPKERNELS_BUILD", "auto")
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert setup.compiled_parts() == ([], {})
    assert "there is no C++ compiler" in capsys.readouterr().err


def test_missing_compiler_fails_the_cpu_build(monkeypatch, tmp_path):
    monkeypatch.setenv("DPKERNELS_BUILD", "cpu")
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(SystemExit, match=r"there is no C\+\+ compiler"):
        setup.compiled_parts()


def test_missing_torch_says_what_to_do(monkeypatch):
    monkeypatch.setenv("DPKERNELS_BUILD", "auto")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="install torch first, then pip install --no-build-isol"):
        setup.compiled_parts()


def test_compile_error_fails_the_build_with_the_compilers_message(tmp_path):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "module.cpp").write_text("int broken() { return undeclared_name; }\n")
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=tmp_path,
        env={**os.environ, "DPKERNELS_BUILD": "auto"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert re.search("error: .*undeclared_name", result.stdout + result.stderr)


def test_compiler_is_cxx_or_on_path(tmp_path):
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    assert setup.find_compiler({"PATH": str(tmp_path)}) == "g++"
    assert setup.find_compiler({"PATH": str(tmp_path), "CXX": "clang++"}) is None
    assert setup.find_compiler({"PATH": str(tmp_path), "CXX": "g++ -m64"}) == "g++ -m64"
    assert setup.find_compiler({"PATH": str(tmp_path / "empty")}) is None


def test_nvcc_is_in_cuda_home_or_on_path(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert setup.find_nvcc({"PATH": ""}, str(tmp_path)) == str(nvcc)
    assert setup.find_nvcc({"PATH": str(nvcc.parent)}, None) == str(nvcc)
    assert setup.find_nvcc({"PATH": ""}, str(tmp_path / "elsewhere")) is None


@pytest.mark.parametrize("version", ["12.9", "14.0"])
def test_toolkit_of_another_major_version_is_not_compiled_with(version):
    chosen = setup.choose_build("auto", "c++", "nvcc", "13.2", version)
    assert chosen.kind == "cpu"
    assert f"nvcc is of CUDA {version} and torch of CUDA 13.2" in chosen.reason
    with pytest.raises(setup.BuildError, match="install a toolkit of torch's major version"):
        setup.choose_build("cuda", "c++", "nvcc", "13.2", version)
    assert setup.choose_build("auto", "c++", "nvcc", "13.2", "13.0").kind == "cuda"


def nvcc_that_says(folder: Path, *lines: str) -> str:
    """Write a script that prints, to standard error, what ``nvcc --dryrun`` would."""
    nvcc = folder / "nvcc"
    said = "".join(f"#$ {line}\n" for line in lines)
    nvcc.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}END\n")
    nvcc.chmod(0o755)
    return str(nvcc)


VERSION = "gcc -D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0 -D__CUDACC_VER_BUILD__=88"


def test_toolkit_is_where_nvcc_says_and_not_above_it(tmp_path):
    for name in ("bin", "include/cccl", "lib"):
        (tmp_path / "toolkit" / name).mkdir(parents=True)
    top = f"{tmp_path}/toolkit/bin/.."
    nvcc = nvcc_that_says(
        tmp_path,
        f"TOP={top}",
        f'INCLUDES="-I{top}/include" "-I/usr/include" "-I{top}/nowhere" ',
        f'SYSTEM_INCLUDES="-isystem" "{top}/include/cccl" ',
        f'LIBRARIES=  "-L{top}/lib/stubs" "-L{top}/lib"',
        VERSION,
    )
    found = setup.describe_toolkit(nvcc)
    home = tmp_path / "toolkit"
    assert found.home == str(home)
    assert found.version == "13.0"
    assert found.include_dirs == (str(home / "include"), str(home / "include" / "cccl"))
    assert found.library_dirs == (str(home / "lib"),)


@pytest.mark.parametrize("lines", [(), ("TOP=/x",), (VERSION,)])
def test_nvcc_that_does_not_describe_its_toolkit_is_left_to_torch(tmp_path, lines):
    assert setup.describe_toolkit(nvcc_that_says(tmp_path, *lines)) is None


def test_host_compiler_is_told_where_the_toolkit_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path / "wrong"))
    (tmp_path / "lib64").mkdir()
    toolkit = setup.Toolkit(str(tmp_path), "13.0", ("/toolkit/headers",), ("/toolkit/libraries",))
    made = setup.make_extension("c++", "13.0", toolkit)
    for flags in made.extra_compile_args.values():
        after = [flags[i + 1] for i, flag in enumerate(flags) if flag == "-isystem"]
        assert {str(tmp_path / "include"), "/toolkit/headers"} <= set(after)
        assert str(tmp_path / "wrong" / "include") not in after
    assert "/toolkit/libraries" in made.library_dirs
    assert str(tmp_path) == cpp_extension.CUDA_HOME


def test_cuda_architectures_are_those_asked_for_or_what_the_toolkit_knows():
    assert setup.cuda_archs({"TORCH_CUDA_ARCH_LIST": "8.6 9.0a"}, "13.0") == "8.6;9.0a"
    assert setup.cuda_archs({}, "12.8") == "8.0;9.0;10.0+PTX"
    assert setup.cuda_archs({"TORCH_CUDA_ARCH_LIST": ""}, "12.6") == "8.0;9.0+PTX"


def test_cuda_build_compiles_for_the_architectures(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    made = setup.make_extension("c++", "13.0")
    assert ("DPKERNELS_CUDA_ARCHS", '"9.0"') in made.define_macros
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert str(tmp_path / "include") in made.extra_compile_args["nvcc"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_takes_the_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    flags = setup.make_extension("c++", "13.0").extra_compile_args["nvcc"]
    (tmp_path / "kernel.cu").write_text("__global__ void kernel(float* x) { x[threadIdx.x] = 0; }")
    subprocess.run(["nvcc", *flags, "-c", "kernel.cu"], cwd=tmp_path, check=True)
    assert (tmp_path / "kernel.o").is_file()


CUDA_SOURCES = [*ROOT.glob("csrc/**/*.cu"), ROOT / "python_tests" / "gpu" / "noise.cu"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_no_warning_on_either_pass_of_nvcc(monkeypatch, tmp_path, source):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("DPKERNELS_WERROR", "1")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    flags = setup.make_extension("c++", "13.0").extra_compile_args["nvcc"]
    command = ["nvcc", *flags, "-Werror=all-warnings", "-arch=sm_90", f"-I{ROOT / 'csrc'}"]
    # Compiled whole, as the extension is: -cubin would leave the host's pass out.
    command += ["-c", str(source), "-o", str(tmp_path / "object.o")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_binary_is_for_any_x86_64_and_keeps_nan():
    made = setup.make_extension("c++", None)
    flags = made.extra_compile_args["cxx"]
    assert not re.search("-m(arch|tune|cpu|avx)|-Ofast|fast-math", " ".join(flags))


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_warnings_are_errors_only_where_ci_asks_for_it(monkeypatch, tmp_path, cuda):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    for value, fatal in ((None, False), ("", False), ("0", False), ("1", True)):
        if value is None:
            monkeypatch.delenv("DPKERNELS_WERROR", raising=False)
        else:
            monkeypatch.setenv("DPKERNELS_WERROR", value)
        for flags in setup.make_extension("c++", cuda).extra_compile_args.values():
            assert "-Wall" in " ".join(flags)
            assert ("-Werror" in " ".join(flags)) == fatal


def test_openmp_comes_from_torch_and_is_not_linked():
    uses_it = "ATen parallel backend: OpenMP\n"
    assert setup.openmp_flags(uses_it, compiler_is_gcc=True) == ["-fopenmp"]
    assert setup.openmp_flags(uses_it, compiler_is_gcc=False) == []
    assert setup.openmp_flags("ATen parallel backend: native thread pool\n", True) == []
    made = setup.make_extension("c++", None)
    assert not [flag for flag in made.extra_link_args if "omp" in flag]
    assert not [library for library in made.libraries if "omp" in library]


def test_build_config_describes_this_build(extension):
    config = extension.build_config()
    assert config["torch"] == torch.__version__
    assert config["cuda"] == torch.version.cuda
    assert config["cplusplus"] >= 201703
    assert "portable" in config["instruction_sets"]
    if config["compiler"].startswith("gcc"):
        assert config["openmp"] == bool(setup.openmp_flags(torch.__config__.parallel_info(), True))


def test_set_isa_takes_what_the_cpu_has_and_refuses_the_rest(extension):
    before = extension.cpu_features()["active"]
    try:
        for isa in ("avx2", "avx512"):
            if extension.cpu_features()[isa]:
                extension.set_isa(isa)
                assert extension.cpu_features()["active"] == isa
            else:
                with pytest.raises(ValueError, match=f"has no {isa}"):
                    extension.set_isa(isa)
        extension.set_isa("portable")
        assert extension.cpu_features()["active"] == "portable"
        with pytest.raises(ValueError, match="no instruction set 'sse9'; there are portable"):
            extension.set_isa("sse9")
    finally:
        extension.set_isa(before)


IMPORT_AND_RUN = """
import torch, dpkernels
dpkernels.ops.noise.add_gaussian_noise_(torch.zeros(1_000_000), 1.0, 1, 0)
maps = [line.split()[-1] for line in open("/proc/self/maps")]
print("\\n".join(sorted({path for path in maps if "omp" in path.rsplit("/", 1)[-1]})))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_one_openmp_runtime_is_loaded(extension):
    if not extension.build_config()["openmp"]:
        pytest.skip("compiled without OpenMP")
    loaded = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_RUN], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(loaded) == 1, loaded


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64 instructions")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)")
def test_only_the_kernels_of_an_instruction_set_use_it(extension):
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", extension.__file__],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # Every AVX instruction's name begins with v, those on 128-bit registers too.
    using_avx = set()
    function = ""
    for line in listing.splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            function = header[1]
        elif re.match(r"\s*[0-9a-f]+:\tv", line):
            using_avx.add(function)
    in_kernels = {name for name in using_avx if re.search("dpk::avx(2|512)::", name)}
    assert in_kernels, "no AVX kernel found: is the module stripped?"
    assert using_avx == in_kernels
