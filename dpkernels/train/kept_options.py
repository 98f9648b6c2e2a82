"""The options of a run beside its checkpoint: written when it begins, and held to on ``--resume``.

They are a frozen dataclass of strings and numbers, the command's own, in ``options.json``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dpkernels.whole_file import write_text

FILE = "options.json"
T = TypeVar("T")


def write(options: Any, output: Path) -> None:
    """Write them to ``options.json`` in ``output``."""
    write_text(output / FILE, json.dumps(dataclasses.asdict(options), indent=2) + "\n")


def read(kind: Callable[..., T], check: Callable[[T], None], output: Path) -> T:
    """Return what ``write`` wrote; what an earlier version did not know has its default.

    kind: the dataclass. check: raises TypeError or ValueError for options that cannot be.

    Raises FileNotFoundError if nothing was begun there, ValueError for what is not known here.
    """
    file = output / FILE
    if not file.exists():
        raise FileNotFoundError(
            f"output: {file} is not there, so that nothing can be resumed; leave --resume out "
            "to begin"
        )
    try:
        found = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"output: {file} cannot be read ({error}); begin anew") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"output: {file} must hold the options of a run, got a {type(found).__name__}; "
            "begin anew"
        )
    known: Any = kind
    if unknown := found.keys() - {field.name for field in dataclasses.fields(known)}:
        raise ValueError(
            f"output: {file} has options that this version does not know, "
            f"{', '.join(sorted(unknown))}; go on with the version that began the run"
        )
    try:
        check(begun := kind(**found))
    except (TypeError, ValueError) as error:
        raise ValueError(f"output: {file}: {error}; begin anew") from error
    return begun


def resumed(begun: T, given: Mapping[str, Any], output: Path) -> T:
    """Return the options that the run in ``output`` was begun with.

    Raises ValueError where ``given`` has another: the guarantee is for the run as it was begun.
    """
    for name, value in given.items():
        had = getattr(begun, name)
        # Where the data is may have changed since; what it is has not.
        if name != "data_dir" and value is not None and value != had:
            raise ValueError(
                f"{name}: the run in {output} was begun with {had!r}, got {value!r}; leave it out "
                "to go on, or begin another run in another --output"
            )
    moved, options = given.get("data_dir"), begun
    if moved:
        options = dataclasses.replace(begun, data_dir=moved)  # type: ignore[type-var]
    return options


def check_known(name: str, value: str, known: Collection[str]) -> None:
    """Raise ValueError, with all that there are, for what is none of ``known``."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def check_whole(options: Any, *names: str) -> None:
    """Raise ValueError for those of ``options`` that are given and not integers >= 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value}")
