"""Every way to install the package.

The sdist is built first and everything else from what it unpacks to, so that a file it lacks shows.
All builds are made there by one interpreter, so that ninja compiles once, for all workers.
Without optimisation, which takes half of the time: ``make build`` compiles the same files with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from setuptools import build_meta

from dpkernels.info import SWITCHES
from dpkernels.ops.noise.reference import standard_normals
from python_tests.tolerance import assert_as_accurate

ROOT = Path(__file__).resolve().parent.parent
KEY, COUNTER, ELEMENTS = 12345, 7, 1001

# The last -O counts, and setup.py's own comes before it.
COMPILER = f"""#!/bin/sh
exec {os.environ.get("CXX") or "c++"} "$@" -O0
"""

DESCRIBE = f"""
import json, pathlib, torch, dpkernels
noise = torch.zeros({ELEMENTS})
dpkernels.ops.noise.add_gaussian_noise_(noise, 1.0, {KEY}, {COUNTER})
print(json.dumps({{
    "package": dpkernels.__file__,
    "served_by": dpkernels.explain("add_gaussian_noise_").chosen,
    "noise": noise.tolist(),
    "includes": dpkernels.include_paths(),
    "sources": dpkernels.kernel_sources(),
}}))
"""

USE_EXAMPLE = f"""
import json, sys, numpy, noisy
x = numpy.zeros({ELEMENTS}, dtype=numpy.float32)
noisy.add_noise(x, 1.0, {KEY}, {COUNTER})
print(json.dumps({{"noise": x.tolist(), "needs_torch": "torch" in sys.modules}}))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees this one's packages, but not this checkout."""

    folder: Path

    @property
    def compiler(self) -> Path:
        return self.folder / "bin" / "c++"

    @classmethod
    def create(cls, folder: Path) -> Environment:
        venv.create(folder, symlinks=True)
        paths = {"base": str(folder), "platbase": str(folder)}
        site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
        (site_packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        environment = cls(folder)
        environment.compiler.write_text(COMPILER)
        environment.compiler.chmod(0o755)
        return environment

    def run(self, *arguments: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Run Python; return what it printed."""
        inherited = {k: v for k, v in os.environ.items() if k not in (*SWITCHES, "PYTHONPATH")}
        result = subprocess.run(
            [self.folder / "bin" / "python", *arguments],
            cwd=cwd or self.folder,
            env=inherited | {"CXX": str(self.compiler)} | variables,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def pip(self, command: str, *arguments: str | Path, cwd: Path, build: str = "cpu") -> None:
        """Run pip on what is at hand; it downloads nothing."""
        offline = ("--no-index", "--no-deps", "--no-build-isolation")
        self.run("-m", "pip", command, *offline, *arguments, cwd=cwd, DPKERNELS_BUILD=build)

    @contextmanager
    def installed(self, *arguments: str | Path, cwd: Path, build: str = "cpu") -> Iterator[None]:
        """Have the package installed here in the block, whatever the outer environment has."""
        self.pip("install", "--ignore-installed", *arguments, cwd=cwd, build=build)
        try:
            yield
        finally:
            self.run("-m", "pip", "uninstall", "-y", "dpkernels")


def check(environment: Environment, package: Path, served_by: str) -> None:
    """Assert that the installation is the one meant, works, and carries its C++ sources."""
    found = json.loads(environment.run("-c", DESCRIBE))
    assert Path(found["package"]).is_relative_to(package)
    assert found["served_by"] == served_by
    check_noise(found["noise"])
    assert all(Path(folder, "noise", "noise.h").is_file() for folder in found["includes"])
    sources = {Path(file).relative_to(found["includes"][0]) for file in found["sources"]}
    assert {p.relative_to(ROOT / "csrc") for p in ROOT.glob("csrc/*/cpu.cpp")} <= sources
    script = environment.folder / "bin" / "dpkernels"
    report = json.loads(environment.run(script, "info", "--json"))
    assert report["operations"]["cpu"]["add_gaussian_noise_"]["used"] == served_by


def check_noise(values: list[float]) -> None:
    plain = standard_normals(ELEMENTS, KEY, COUNTER)
    exact = standard_normals(ELEMENTS, KEY, COUNTER, dtype=torch.float64)
    assert_as_accurate(torch.tensor(values), plain, exact)


def objects(tree: Path) -> dict[Path, int]:
    """Return the object files and when each was compiled."""
    return {path: path.stat().st_mtime_ns for path in tree.glob("build/objects-*/**/*.o")}


@pytest.fixture
def workshop(tmp_path_factory) -> Iterator[Path]:
    """A folder that all workers share: one test at a time, which finds what others have built."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packaging"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture
def sdist(workshop) -> Path:
    if not list(workshop.glob("*.tar.gz")):
        local = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, workshop / "checkout", ignore=local)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(workshop / "checkout")
            build_meta.build_sdist(str(workshop))
    (found,) = workshop.glob("*.tar.gz")
    return found


@pytest.fixture
def tree(sdist) -> Path:
    """What the sdist unpacks to."""
    folder = sdist.with_name(sdist.name.removesuffix(".tar.gz"))
    if not folder.exists():
        with tarfile.open(sdist) as archive:
            archive.extractall(folder.parent, filter="data")
    return folder


@pytest.fixture
def environment(workshop) -> Environment:
    folder = workshop / "environment"
    return Environment(folder) if folder.exists() else Environment.create(folder)


@pytest.fixture
def wheel(workshop, environment, tree) -> Path:
    if not list(workshop.glob("*.whl")):
        environment.pip("wheel", "-w", workshop, ".", cwd=tree)
    (found,) = workshop.glob("*.whl")
    return found


def test_sdist_holds_everything_but_what_is_built(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for folder in ("csrc", "dpkernels", "python_tests", "benchmarks"):
        here = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file()}
        here = {p for p in here if p.suffix not in (".so", ".pyc")}
        there = {p.relative_to(unpacked) for p in (unpacked / folder).rglob("*") if p.is_file()}
        assert there == here
    for name in ("LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


def test_wheel_is_for_this_platform_and_carries_the_sources(wheel):
    assert not wheel.name.endswith("-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    assert {f"dpkernels/{p.relative_to(ROOT)}" for p in sources} <= names
    assert f"dpkernels/_C{sysconfig.get_config_var('EXT_SUFFIX')}" in names
    assert "dpkernels/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"dpkernels"}


def test_installed_wheel_works(environment, wheel, tree):
    with environment.installed(wheel, cwd=tree):
        check(environment, environment.folder, "cpp")


def test_pip_install_works_and_compiles_nothing_anew(environment, wheel, tree):
    before = objects(tree)
    with environment.installed(".", cwd=tree):
        check(environment, environment.folder, "cpp")
    assert before and objects(tree) == before


def test_editable_install_works_and_can_do_without_the_extension(environment, wheel, tree):
    before = objects(tree)
    with environment.installed("-e", ".", cwd=tree):
        check(environment, tree, "cpp")
    with environment.installed("-e", ".", cwd=tree, build="none"):
        check(environment, tree, "reference")
    assert before and objects(tree) == before


def test_pure_python_wheel_runs_on_the_reference(environment, tree, tmp_path):
    environment.pip("wheel", "-w", tmp_path, ".", cwd=tree, build="none")
    (found,) = tmp_path.glob("*.whl")
    assert found.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(found).namelist() if name.endswith(".so")]
    with environment.installed(found, cwd=tree):
        check(environment, environment.folder, "reference")


def test_another_extension_calls_a_kernel_from_its_own_cpp(environment, wheel, tree, tmp_path):
    example = tmp_path / "example"
    shutil.copytree(ROOT / "python_tests" / "example_extension", example)
    with environment.installed(wheel, cwd=tree):
        environment.run("setup.py", "build_ext", "--inplace", cwd=example)
    found = json.loads(environment.run("-c", USE_EXAMPLE, cwd=example))
    assert not found["needs_torch"]
    check_noise(found["noise"])
