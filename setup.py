"""Build dpkernels: the Python package and, where it can be compiled, ``dpkernels._C``.

``DPKERNELS_BUILD`` says what to compile:

``auto``  (default) CUDA if nvcc and a CUDA build of torch are both there, else CPU; without a C++
          compiler nothing, and says so. Whether a GPU is present is not asked.
``cpu``   the C++ kernels.
``cuda``  the C++ and CUDA kernels, for the architectures in ``TORCH_CUDA_ARCH_LIST``.
``none``  nothing: every operation is served by its plain-PyTorch reference.

``DPKERNELS_WERROR=1`` makes compiler warnings errors. It is for CI: a compiler newer than ours may
warn of what ours does not, and an installation must not fail on that.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILDS = ("auto", "cpu", "cuda", "none")
# Commands that only describe the project need neither torch nor a compiler.
DESCRIBING_COMMANDS = {"clean", "dist_info", "egg_info", "sdist"}


class BuildError(Exception):
    """The build that was asked for is impossible; the message says why and what to do."""


@dataclass(frozen=True)
class Build:
    """What is compiled, ``"cpu"``, ``"cuda"`` or ``"none"``, and why that."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit as its nvcc describes it: its folder, its version, what nvcc searches."""

    home: str
    version: str
    include_dirs: tuple[str, ...]
    library_dirs: tuple[str, ...]


def choose_build(
    requested: str,
    compiler: str | None,
    nvcc: str | None,
    torch_cuda: str | None,
    nvcc_cuda: str | None = None,
) -> Build:
    """Return what to compile; raise BuildError if what was asked for cannot be.

    requested: the value of ``DPKERNELS_BUILD``.
    compiler, nvcc: the C++ and the CUDA compiler, or None where there is none.
    torch_cuda: the CUDA version that torch was built with, or None.
    nvcc_cuda: the CUDA version of nvcc, or None where it is not known.
    """
    if requested not in BUILDS:
        raise BuildError(f"DPKERNELS_BUILD must be one of {', '.join(BUILDS)}, got {requested!r}")
    if requested == "none":
        return Build("none", "DPKERNELS_BUILD=none")
    if compiler is None:
        missing = "there is no C++ compiler: install one (g++ or clang++) or name it in CXX"
        if requested == "auto":
            return Build("none", f"{missing}; every operation will run on its reference")
        raise BuildError(f"DPKERNELS_BUILD={requested}, but {missing}")
    no_cuda = why_no_cuda(nvcc, torch_cuda, nvcc_cuda)
    if requested == "cuda" and no_cuda:
        raise BuildError(f"DPKERNELS_BUILD=cuda, but {no_cuda}")
    if requested == "cpu" or no_cuda:
        return Build("cpu", no_cuda or "DPKERNELS_BUILD=cpu")
    return Build("cuda", f"{nvcc} and torch's CUDA {torch_cuda} are there")


def why_no_cuda(
    nvcc: str | None, torch_cuda: str | None, nvcc_cuda: str | None = None
) -> str | None:
    """Return the reason why CUDA kernels cannot be compiled, or None if they can."""
    if torch_cuda is None:
        return "the installed torch is not a CUDA build"
    if nvcc is None:
        return "there is no nvcc: install the CUDA toolkit, put nvcc on PATH or set CUDA_HOME"
    if nvcc_cuda is not None and nvcc_cuda.split(".")[0] != torch_cuda.split(".")[0]:
        return (
            f"{nvcc} is of CUDA {nvcc_cuda} and torch of CUDA {torch_cuda}: install a toolkit of "
            "torch's major version"
        )
    return None


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """Return the C++ compiler's command: ``CXX`` if set, else the first usual name on PATH."""
    names = [environment["CXX"]] if environment.get("CXX") else ["c++", "g++", "clang++"]
    path = environment.get("PATH", os.defpath)
    return next((name for name in names if shutil.which(shlex.split(name)[0], path=path)), None)


def find_nvcc(environment: Mapping[str, str], cuda_home: str | None) -> str | None:
    """Return the path of nvcc in ``cuda_home``, as torch found it, or else on PATH."""
    if cuda_home is not None and (found := shutil.which(str(Path(cuda_home, "bin", "nvcc")))):
        return found
    return shutil.which("nvcc", path=environment.get("PATH", os.defpath))


def describe_toolkit(nvcc: str) -> Toolkit | None:
    """Return what nvcc says of its toolkit, or None if it says nothing.

    The folder above nvcc's need not be it: nvcc on PATH may be a script or a distribution's wrapper
    in a folder of its own, and then the host compiler would not find ``cuda_runtime.h`` there.
    """
    run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True
    )
    variables = dict(re.findall(r"^#\$ (\w+)=(.*)$", run.stderr, re.MULTILINE))
    version = re.search(r"CUDACC_VER_MAJOR__=(\d+).*CUDACC_VER_MINOR__=(\d+)", run.stderr)
    if run.returncode or "TOP" not in variables or version is None:
        return None
    # A folder that every compiler searches anyway must not move to the front of its list.
    usual = {"/usr/include", "/usr/local/include"}

    def folders(*names: str) -> tuple[str, ...]:
        words = [word for name in names for word in shlex.split(variables.get(name, ""))]
        paths = (os.path.realpath(re.sub("^-[IL]", "", word)) for word in words)
        return tuple(path for path in paths if os.path.isdir(path) and path not in usual)

    return Toolkit(
        home=os.path.realpath(variables["TOP"]),
        version=f"{version[1]}.{version[2]}",
        include_dirs=folders("INCLUDES", "SYSTEM_INCLUDES"),
        library_dirs=folders("LIBRARIES"),
    )


def cuda_archs(environment: Mapping[str, str], torch_cuda: str) -> str:
    """Return the architectures to compile for: ``TORCH_CUDA_ARCH_LIST``, or A100, H100, B200.

    The last one includes PTX for GPUs that are newer still. CUDA knows 10.0 since 12.8.
    """
    if wanted := environment.get("TORCH_CUDA_ARCH_LIST"):
        return wanted.replace(" ", ";")
    version = tuple(int(part) for part in torch_cuda.split(".")[:2])
    return "8.0;9.0;10.0+PTX" if version >= (12, 8) else "8.0;9.0+PTX"


def openmp_flags(parallel_info: str, compiler_is_gcc: bool) -> list[str]:
    """Return the flags that make ``at::parallel_for`` run on torch's own OpenMP threads.

    Only the compiler gets ``-fopenmp``, never the linker: the symbols come from the libgomp that
    libtorch_cpu has loaded, and linking would load a second runtime with its own threads. Clang
    calls another runtime (libomp), which torch's Linux builds do not load.
    """
    uses_openmp = "ATen parallel backend: OpenMP" in parallel_info
    return ["-fopenmp"] if uses_openmp and compiler_is_gcc else []


def warning_flags(environment: Mapping[str, str]) -> list[str]:
    """Return the compilers' warnings: errors only where ``DPKERNELS_WERROR=1`` asks for that."""
    fatal = environment.get("DPKERNELS_WERROR") == "1"
    return ["-Wall", "-Wextra", *(["-Werror"] if fatal else [])]


def sources(*suffixes: str) -> list[str]:
    """Return the files under ``csrc`` with these suffixes, relative to the project."""
    found = (p for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)
    return sorted(str(p.relative_to(ROOT)) for p in found)


def make_extension(compiler: str, cuda: str | None, toolkit: Toolkit | None = None) -> Extension:
    """Return ``dpkernels._C`` as setuptools takes it.

    compiler: the C++ compiler's command.
    cuda: the CUDA version to compile for, or None for a build without.
    toolkit: where nvcc and its headers are; None for where torch looks for them.
    """
    import torch
    from torch.utils import cpp_extension

    # The versions are part of the command line so that ninja compiles anew for another torch.
    macros = [("DPKERNELS_TORCH_VERSION", f'"{torch.__version__}"')]
    # No -march and no -ffast-math: one binary runs on every x86-64 and picks its instruction set
    # at run time, and NaN and infinity must be seen. C++20 is what torch's headers are built for.
    # -g0 undoes the -g that Python was built with: most of the binary would be debug information.
    common = ["-O3", "-std=c++20"]
    warnings = warning_flags(os.environ)
    is_gcc = cpp_extension.check_compiler_is_gcc(compiler)
    cxx = [*common, "-g0", *warnings, "-fno-math-errno", "-fvisibility=hidden"]
    cxx += openmp_flags(torch.__config__.parallel_info(), is_gcc)
    flags = {"cxx": cxx}
    files = sources(".cpp")
    make: Callable[..., Extension] = cpp_extension.CppExtension
    if cuda is not None:
        archs = cuda_archs(os.environ, cuda)
        os.environ["TORCH_CUDA_ARCH_LIST"] = archs
        macros.append(("DPKERNELS_CUDA_VERSION", f'"{cuda}"'))
        macros.append(("DPKERNELS_CUDA_ARCHS", f'"{archs}"'))
        host_flags = ",".join([*warnings, "-fvisibility=hidden"])
        flags["nvcc"] = [*common, "-lineinfo", f"--compiler-options={host_flags}"]
        files += sources(".cu")
        make = cpp_extension.CUDAExtension
        if toolkit is not None:
            cpp_extension.CUDA_HOME = toolkit.home
    extension = make("dpkernels._C", files, define_macros=macros, extra_compile_args=flags)
    if cuda is not None and toolkit is not None:
        extension.include_dirs += toolkit.include_dirs
        extension.library_dirs += toolkit.library_dirs
    # Other people's headers come in as system headers: warnings are about ours.
    for kind in flags.values():
        for path in extension.include_dirs:
            kind += ["-isystem", path]
    extension.include_dirs = [str(ROOT / "csrc")]
    return extension


class BuildPyWithSources(build_py):
    """Install ``csrc`` with the package, so that other extensions can compile against it.

    An editable install finds it in the checkout.
    """

    def run(self) -> None:
        """Copy the package and the C++ sources."""
        super().run()
        if self.editable_mode:
            if not self.distribution.ext_modules:
                self._remove_extension_in_place()
            return
        for source, target in self._copies():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return what ``run`` writes."""
        outputs: list[str] = super().get_outputs(include_bytecode)
        return outputs + ([] if self.editable_mode else [target for _, target in self._copies()])

    def _copies(self) -> list[tuple[str, str]]:
        files = sources(".h", ".inl", ".cpp", ".cu", ".cuh")
        return [(file, str(Path(self.build_lib, "dpkernels", file))) for file in files]

    def _remove_extension_in_place(self) -> None:
        """Remove what an earlier editable install compiled: this one is to be without it."""
        for stale in (ROOT / "dpkernels").glob("_C.*.so"):
            stale.unlink()


def compiled_parts() -> tuple[list[Extension], dict[str, type]]:
    """Return the extension modules and the commands that build them."""
    requested = os.environ.get("DPKERNELS_BUILD") or "auto"
    try:
        build, toolkit = _choose_for_this_machine(requested)
    except BuildError as error:
        raise SystemExit(f"dpkernels: {error}") from None
    doing = {"none": "nothing", "cpu": "for the CPU", "cuda": "for the CPU and CUDA"}[build.kind]
    print(f"dpkernels: compiling {doing}: {build.reason}", file=sys.stderr)
    if build.kind == "none":
        return [], {}

    import torch
    from torch.utils.cpp_extension import BuildExtension

    compiler = find_compiler(os.environ)
    assert compiler is not None
    # What torch compiles with; setuptools links with the same then.
    os.environ["CXX"] = compiler
    _put_ninja_on_path()
    cuda = torch.version.cuda if build.kind == "cuda" else None
    extension = make_extension(compiler, cuda, toolkit)

    class BuildIncrementally(BuildExtension):
        """Keep the object files in one place, so that ninja compiles only what changed.

        An editable install would compile everything, every time, in a temporary folder.
        """

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(ROOT / "build" / f"objects-{sys.implementation.cache_tag}")

    return [extension], {"build_ext": BuildIncrementally}


def _choose_for_this_machine(requested: str) -> tuple[Build, Toolkit | None]:
    if requested == "none":
        return choose_build(requested, None, None, None), None
    try:
        import torch
        from torch.utils.cpp_extension import CUDA_HOME
    except ImportError as error:
        raise BuildError(
            f"torch cannot be imported ({error}), and the kernels are compiled against it: install "
            "torch first, then pip install --no-build-isolation; or set DPKERNELS_BUILD=none"
        ) from None
    nvcc = find_nvcc(os.environ, CUDA_HOME)
    toolkit = None
    if nvcc is not None and torch.version.cuda is not None:
        toolkit = describe_toolkit(nvcc)
    version = None if toolkit is None else toolkit.version
    compiler = find_compiler(os.environ)
    return choose_build(requested, compiler, nvcc, torch.version.cuda, version), toolkit


def _put_ninja_on_path() -> None:
    """Let torch find the ninja of this environment: pip runs without the environment's PATH."""
    try:
        import ninja
    except ImportError:
        return
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), ninja.BIN_DIR])


def main() -> None:
    """Hand everything to setuptools; what is not here is in pyproject.toml."""
    extensions: list[Extension] = []
    commands: dict[str, type] = {}
    if not DESCRIBING_COMMANDS.intersection(sys.argv):
        extensions, commands = compiled_parts()
    setup(ext_modules=extensions, cmdclass={"build_py": BuildPyWithSources, **commands})


# setuptools' build backend runs this file under the name __main__ too.
if __name__ == "__main__":
    main()
