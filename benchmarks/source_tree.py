"""The sources of an installation: copied to a folder of their own, and hashed.

A build for another torch, or with a sanitizer, must not replace what is compiled in the checkout.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("csrc", "dpkernels", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")


def copy(to: Path, root: Path = ROOT) -> None:
    """Make ``to`` hold the sources as they are now, with the times at which they changed.

    What was compiled there in ``to / "build"`` stays: ninja compiles what is newer.
    """
    to.mkdir(parents=True, exist_ok=True)
    compiled = shutil.ignore_patterns("*.so", "__pycache__")
    for part in PARTS:
        if (root / part).is_dir():
            shutil.rmtree(to / part, ignore_errors=True)
            shutil.copytree(root / part, to / part, ignore=compiled)
        else:
            shutil.copy2(root / part, to / part)


def digest(root: Path = ROOT) -> str:
    """Return the SHA-256 of what the extension is built from: csrc, setup.py, the schemas."""
    found = hashlib.sha256()
    for path in [root / "setup.py", *sorted(p for p in (root / "csrc").rglob("*") if p.is_file())]:
        found.update(f"{path.relative_to(root).as_posix()}\0".encode())
        found.update(path.read_bytes() + b"\0")
    for schema in sorted(schemas(root)):
        found.update(f"{schema}\0".encode())
    return found.hexdigest()


def schemas(root: Path = ROOT) -> Iterator[str]:
    """Yield the operators' schemas, as ``backend.register`` is called with them."""
    for path in (root / "dpkernels" / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="backend"), attr="register"),
                    args=[ast.Constant(value=str(schema)), *_],
                ):
                    yield schema
