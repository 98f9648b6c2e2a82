"""The folder of a training: one process at a time, and no folder of a run that never began."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpkernels.whole_file import check_folder

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


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make ``folder`` and train in it alone; take back what was made if nothing came of it.

    Raises what ``alone_in`` does, NotADirectoryError for what is no folder.
    """
    check_folder(folder, "output")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone_in(folder):
            yield
    except BaseException:
        if made and [file.name for file in folder.iterdir()] == [FILE]:
            (folder / FILE).unlink()
            for each in made:
                # Others may have put something beside it since.
                with suppress(OSError):
                    each.rmdir()
        raise
