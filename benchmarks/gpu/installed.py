"""Look at a CUDA build from inside: what is compiled, and what it says without a driver.

Run as a file, by the environment that has the build and from a folder without the sources. Prints
JSON, or raises where something is not as it must be.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dpkernels
from dpkernels import backend


def main() -> None:
    """Check the installation; print what it is."""
    extension = backend.extension
    assert extension is not None, "dpkernels._C was not built"
    config = extension.build_config()
    assert config["cuda"] == torch.version.cuda is not None, config
    registered = [n for n in backend.operations() if _has_cuda_kernel(n)]
    compiled = [n for n in registered if backend.explain(n, "cuda").chosen == "cuda"]
    assert compiled, "no operator has a compiled CUDA implementation"
    _check_information(compiled)
    driver = torch.cuda.is_available()
    report = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "compiler": config["compiler"],
        },
        "architectures": config["cuda_archs"],
        "operators": {"CUDA": len(registered), "compiled": compiled},
        "driver": driver,
        "without_driver": None if driver else refusals(),
    }
    print(json.dumps(report))


def _has_cuda_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"dpkernels::{name}", "CUDA"))


def _check_information(compiled: list[str]) -> None:
    """Assert that ``dpkernels info`` says the same."""
    command = [str(Path(sys.executable).parent / "dpkernels"), "info"]
    subprocess.run(command, check=True, capture_output=True)
    printed = subprocess.run([*command, "--json"], check=True, capture_output=True).stdout
    operations: dict[str, Any] = json.loads(printed)["operations"]["cuda"]
    assert compiled == [n for n, serving in operations.items() if serving["used"] == "cuda"]


def refusals() -> dict[str, str]:
    """Return what calls that need a GPU say without one; raise if one does not say why."""
    matrix = torch.eye(3)

    def by_name() -> None:
        with dpkernels.use_backend("cuda"):
            dpkernels.ops.roots.eigh(matrix)

    said = {
        "a tensor on the GPU": _said(lambda: dpkernels.ops.roots.eigh(matrix.to("cuda"))),
        "a CPU tensor on the backend cuda": _said(by_name),
    }
    assert "NVIDIA driver" in said["a tensor on the GPU"], said
    assert "these are on cpu" in said["a CPU tensor on the backend cuda"], said
    # The CPU kernels of the same binary need none.
    noise = torch.zeros(5)
    dpkernels.ops.noise.add_gaussian_noise_(noise, 1.0, 1, 0)
    assert bool((noise != 0).all())
    return said


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    raise AssertionError("a call that needs a GPU computed without one")


if __name__ == "__main__":
    main()
