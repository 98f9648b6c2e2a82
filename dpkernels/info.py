"""What is installed, what was compiled, and which backend serves which operation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

import dpkernels
from dpkernels import backend

DEVICES = ("cpu", "cuda")
SWITCHES = ("DPKERNELS_BACKEND", "DPKERNELS_CPU_ISA", "TRITON_INTERPRET")

_NOT_BUILT = "dpkernels._C is not built"
_INDENT = "  "


def collect() -> dict[str, Any]:
    """Return everything that ``dpkernels info`` prints, in types that JSON knows.

    ``operations[device][name]`` has ``used``, the backend that serves float32 tensors now (None if
    the one asked for by name cannot), and ``why_not``, for every backend the reason why it cannot
    serve them or None if it can. The device need not be present.
    """
    extension = backend.extension
    return {
        "versions": versions(),
        "devices": _devices(),
        "build": None if extension is None else extension.build_config(),
        "cpu_features": None if extension is None else extension.cpu_features(),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in SWITCHES},
        "operations": {
            device: {name: _serving(name, device) for name in backend.operations()}
            for device in DEVICES
        },
    }


def versions() -> dict[str, str | None]:
    """Return the versions of the package and of what it runs on."""
    try:
        triton: str | None = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "dpkernels": dpkernels.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _devices() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _serving(operation: str, device: str) -> dict[str, Any]:
    return {
        "used": backend.explain(operation, device).chosen,
        "why_not": {name: _why_not(operation, name, device) for name in backend.BACKENDS},
    }


def _why_not(operation: str, name: str, device: str) -> str | None:
    # Asked for by name, a backend is chosen if and only if it can serve the call.
    with backend.use_backend(name):
        return backend.explain(operation, device).reasons.get(name)


def render(report: dict[str, Any]) -> str:
    """Return the report of ``collect`` as aligned plain text."""
    sections = [
        _section("versions", {k: v or "none" for k, v in report["versions"].items()}),
        _section("devices", {"gpu": ", ".join(report["devices"]) or "none"}),
        _section("build", _build_lines(report["build"])),
        _section("cpu", _cpu_lines(report)),
    ]
    switches = {name: value for name, value in report["environment"].items() if value is not None}
    if switches:
        sections.append(_section("environment", switches))
    sections += [_matrix(device, report["operations"][device]) for device in report["operations"]]
    return "\n\n".join(sections)


def _build_lines(build: dict[str, Any] | None) -> dict[str, str]:
    if build is None:
        return {"extension": _NOT_BUILT}
    lines = {
        "extension": "dpkernels._C",
        "compiler": f"{build['compiler']}, C++ {build['cplusplus'] // 100 % 100}",
        "torch": build["torch"],
        "openmp": "yes" if build["openmp"] else "no: the kernels run in one thread",
        "instruction sets": ", ".join(build["instruction_sets"]),
        "cuda": build["cuda"] or "none",
    }
    if build["cuda"] is not None:
        lines["cuda architectures"] = ", ".join(build["cuda_archs"])
    return lines


def _cpu_lines(report: dict[str, Any]) -> dict[str, str]:
    lines = {"threads": str(report["threads"])}
    if (features := report["cpu_features"]) is not None:
        lines |= {name: "yes" if features[name] else "no" for name in ("avx2", "avx512")}
        lines["kernels run on"] = features["active"]
    return lines


def _section(title: str, lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join([title, *(f"{_INDENT}{name:{width}}  {lines[name]}" for name in lines)])


def _matrix(device: str, operations: dict[str, dict[str, Any]]) -> str:
    """Return a table of operations by backends, and the numbered reasons for every "no"."""
    numbers: dict[str, int] = {}
    rows = [["", *backend.BACKENDS]]
    for name, serving in operations.items():
        row = [name]
        for candidate, reason in serving["why_not"].items():
            if reason is not None:
                row.append(f"no [{numbers.setdefault(reason, len(numbers) + 1)}]")
            else:
                row.append("used" if candidate == serving["used"] else "yes")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"operations on float32 tensors on {device}"]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append((_INDENT + "  ".join(cells)).rstrip())
    lines += [f"{_INDENT}[{number}] {reason}" for reason, number in numbers.items()]
    return "\n".join(lines)
