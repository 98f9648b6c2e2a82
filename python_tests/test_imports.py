"""Who imports whom, and what ``import dpkernels`` costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dpkernels

PACKAGE = Path(dpkernels.__file__).parent
ROOM_OF_OPS = ("dpkernels.backend", "dpkernels.ops")
FILES = "dpkernels.whole_file"

# What the modules of each part may import of the package; parts that do not exist yet are bound
# from their first file.
ALLOWED = {
    "backend.py": (),
    "ops": ROOM_OF_OPS,
    "whole_file.py": (),
    "privacy": ("dpkernels.privacy", FILES),
    "precondition": ("dpkernels.precondition", "dpkernels.engine", *ROOM_OF_OPS),
    "fisher": (
        "dpkernels.fisher",
        "dpkernels.precondition",
        "dpkernels.engine",
        *ROOM_OF_OPS,
    ),
    "postprocess": ("dpkernels.postprocess", *ROOM_OF_OPS),
    "engine": ("dpkernels.engine", *ROOM_OF_OPS),
    "run": (
        FILES,
        "dpkernels.info",
        "dpkernels.run",
        "dpkernels.engine",
        "dpkernels.privacy",
        "dpkernels.precondition",
        *ROOM_OF_OPS,
    ),
    "opacus": (
        "dpkernels.opacus",
        "dpkernels.info",
        "dpkernels.run",
        "dpkernels.engine",
        "dpkernels.privacy",
        "dpkernels.precondition",
        *ROOM_OF_OPS,
    ),
    "train": (
        FILES,
        "dpkernels.train",
        "dpkernels.run",
        "dpkernels.engine",
        "dpkernels.privacy",
        "dpkernels.precondition",
        "dpkernels.postprocess",
        *ROOM_OF_OPS,
    ),
    "diagnose": (
        FILES,
        "dpkernels.diagnose",
        "dpkernels.train",
        "dpkernels.run",
        "dpkernels.engine",
        "dpkernels.privacy",
        "dpkernels.precondition",
        "dpkernels.postprocess",
        *ROOM_OF_OPS,
    ),
    "repro": (
        FILES,
        "dpkernels.repro",
        "dpkernels.train",
        "dpkernels.federated",
        "dpkernels.fisher",
        "dpkernels.precondition",
        "dpkernels.privacy",
        "dpkernels.info",
    ),
    "federated": (
        FILES,
        "dpkernels.federated",
        "dpkernels.fisher",
        "dpkernels.train.data",
        "dpkernels.train.formats",
        "dpkernels.train.interrupts",
        "dpkernels.train.alone",
        "dpkernels.train.ending",
        "dpkernels.train.kept_options",
        "dpkernels.train.models",
        "dpkernels.run",
        "dpkernels.engine",
        "dpkernels.privacy",
        "dpkernels.precondition",
        "dpkernels.info",
        *ROOM_OF_OPS,
    ),
}


def imported(source: str, module: str, is_package: bool = False) -> set[str]:
    """Return the modules of ours that ``source`` imports, as absolute names."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{prefix}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "dpkernels"}


def forbidden(names: set[str], part: str) -> set[str]:
    """Return those of ``names`` that ``part`` of the package may not import."""
    allowed = ALLOWED[part]
    return {
        name for name in names if not any(f"{name}.".startswith(f"{root}.") for root in allowed)
    }


@pytest.mark.parametrize("part", ALLOWED)
def test_the_import_rule(part: str) -> None:
    root = PACKAGE / part
    for file in [root] if root.suffix else sorted(root.rglob("*.py")):
        is_package = file.name == "__init__.py"
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if is_package else parts)
        wrong = forbidden(imported(file.read_text(), module, is_package), part)
        assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("from dpkernels.engine import step", "ops"),
        ("from ...engine import step", "ops"),
        ("from dpkernels import privacy", "ops"),
        ("import dpkernels.cli", "ops"),
        ("import dpkernels", "ops"),
        ("def late():\n    from dpkernels.federated import fedavg", "engine"),
        ("from dpkernels.ops import clip", "privacy"),
        ("from dpkernels.privacy import samplers", "engine"),
        ("from dpkernels.opacus import PrivacyEngine", "run"),
        ("from dpkernels import ops", "backend.py"),
        ("from dpkernels.repro import tables", "train"),
        ("from dpkernels.diagnose import measures", "train"),
        ("from dpkernels.run import loader", "repro"),
    ],
)
def test_the_rule_sees_what_breaks_it(source: str, part: str) -> None:
    module = "dpkernels.backend" if part == "backend.py" else f"dpkernels.{part}.room.module"
    assert forbidden(imported(source, module), part)


def test_the_rule_lets_through_what_it_should() -> None:
    source = "from dpkernels import backend\nfrom dpkernels.ops.checks import check_finite\n"
    source += "from . import reference\nimport torch\nfrom torch import Tensor\n"
    names = imported(source, "dpkernels.ops.clip", is_package=True)
    assert names == {
        "dpkernels.backend",
        "dpkernels.ops.checks.check_finite",
        "dpkernels.ops.clip.reference",
    }
    assert not forbidden(names, "ops")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import dpkernels\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    new = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert "dpkernels" in new
    heavy = {"triton", "scipy", "numpy", "matplotlib", "sklearn", "dp_accounting", "opacus", "flwr"}
    assert not new & heavy
