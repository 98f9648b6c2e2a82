"""Where the C++ headers and kernels are, for extensions that build on them."""

from __future__ import annotations

from pathlib import Path


def _sources() -> Path:
    """Return the folder of the C++ sources: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def include_paths() -> list[str]:
    """Return the folders to compile with (``-I``): ``#include "noise/noise.h"`` is found there.

    The headers and kernels need a C++17 compiler and nothing else, neither torch nor Python.
    """
    return [str(_sources())]


def kernel_sources(*operations: str) -> list[str]:
    """Return the torch-free source files of the named operations, to compile into an extension.

    operations: names of rooms, such as ``"clip"`` or ``"noise"``; all of them if none is named.
    There is no library to link: an extension carries its own copy of what it uses, so no two
    builds of dpkernels can get in each other's way.
    """
    root = _sources()
    rooms: dict[str, list[Path]] = {}
    for path in sorted(root.glob("*/*.cpp")):
        if not path.name.endswith("bind.cpp"):
            rooms.setdefault(path.parent.name, []).append(path)
    files = rooms.pop("common")
    unknown = sorted(set(operations) - rooms.keys())
    if unknown:
        raise ValueError(f"kernel_sources: no {', '.join(unknown)}; there are {', '.join(rooms)}")
    return [str(path) for path in sum((rooms[name] for name in operations or rooms), files)]
