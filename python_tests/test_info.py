"""What ``dpkernels info`` prints, and what importing the package costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpkernels
from dpkernels import backend, cli, info

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **environment: str) -> str:
    """Run Python in a process of its own, without the switches that the tests set."""
    env = {k: v for k, v in os.environ.items() if k not in info.SWITCHES} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=env, check=True, capture_output=True, text=True
    ).stdout


def test_every_operation_and_backend_has_an_answer():
    operations = info.collect()["operations"]
    assert list(operations) == ["cpu", "cuda"]
    for device, rows in operations.items():
        assert tuple(rows) == backend.operations()
        for name, serving in rows.items():
            assert tuple(serving["why_not"]) == backend.BACKENDS
            assert serving["used"] == dpkernels.explain(name, device).chosen
            assert serving["why_not"][serving["used"]] is None
            assert serving["why_not"]["reference"] is None


def test_the_reason_of_every_no_is_printed():
    report = info.collect()
    text = info.render(report)
    reasons = {
        reason
        for rows in report["operations"].values()
        for serving in rows.values()
        for reason in serving["why_not"].values()
        if reason is not None
    }
    assert reasons
    assert all(reason in text for reason in reasons)


def test_matrix_is_aligned_and_numbers_its_reasons():
    why_not = {"reference": None, "cpp": None, "triton": "no GPU", "cuda": "not compiled"}
    report = info.collect()
    report["operations"] = {
        "cpu": {
            "clip": {"used": "cpp", "why_not": why_not},
            "add_noise": {"used": None, "why_not": why_not},
        }
    }
    assert info.render(report).split("\n\n")[-1].splitlines() == [
        "operations on float32 tensors on cpu",
        "             reference  cpp   triton  cuda",
        "  clip       yes        used  no [1]  no [2]",
        "  add_noise  yes        yes   no [1]  no [2]",
        "  [1] no GPU",
        "  [2] not compiled",
    ]


def test_an_installation_without_the_extension_says_so(monkeypatch):
    monkeypatch.setattr(backend, "extension", None)
    report = info.collect()
    assert report["build"] is None
    assert "dpkernels._C is not built" in info.render(report)


def test_a_cuda_build_lists_its_architectures():
    report = info.collect()
    report["build"] = {
        "compiler": "gcc 12.2.0",
        "cplusplus": 202002,
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "cuda_archs": ["8.0", "9.0+PTX"],
        "openmp": False,
        "instruction_sets": ["portable"],
    }
    text = info.render(report)
    assert "cuda architectures  8.0, 9.0+PTX" in text
    assert "gcc 12.2.0, C++ 20" in text
    assert "openmp              no: the kernels run in one thread" in text


def test_command_prints_versions_and_json(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert dpkernels.__version__ in text
    assert torch.__version__ in text
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info.collect()


def test_backend_asked_for_by_environment_is_shown():
    output = run("-m", "dpkernels", "info", "--json", DPKERNELS_BACKEND="reference")
    report = json.loads(output)
    assert report["environment"]["DPKERNELS_BACKEND"] == "reference"
    used = {row["used"] for rows in report["operations"].values() for row in rows.values()}
    assert used == {"reference"}


def test_unknown_command_names_the_known(capsys):
    with pytest.raises(SystemExit):
        cli.main(["inform"])
    assert "choose from" in capsys.readouterr().err


def test_import_after_torch_loads_only_the_package_itself():
    new = run(
        "-c",
        "import sys, torch; before = set(sys.modules); import dpkernels; "
        "print(*sorted(set(sys.modules) - before))",
    ).split()
    assert "dpkernels.ops.clip" in new
    roots = {name.partition(".")[0] for name in new}
    assert roots - set(sys.stdlib_module_names) <= {"dpkernels", "torch"}
    assert not {"dpkernels.cli", "dpkernels.info"} & set(new)
