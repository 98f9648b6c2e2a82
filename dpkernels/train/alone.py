"""One process at a time in a folder of a training."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = ".lock"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from training in ``folder``, which must exist.

    Two that went on from one checkpoint would release two trainings, and each report would count
    one. The system frees the folder when the process ends, however it ends: the file that is left
    says nothing.

    Raises RuntimeError, at once, if another process trains there.
    """
    with (folder / FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"output: another process trains in {folder}; wait for its end, or take another "
                "folder"
            ) from None
        yield
