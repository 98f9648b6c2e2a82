"""Files that hold the old or the new whole, whenever they are looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str], *, writer: object = None) -> Iterator[Path]:
    """Give a file beside ``path`` to be written, which becomes ``path`` if the block succeeds.

    An error, an interruption or a full disk leaves what ``path`` held before, and no half of the
    new. What is not a file, ``/dev/stdout`` say, is written directly.

    writer: who writes, if several may at once: each has a file of its own, and the last one's
        stays. By default the process. What a killed one leaves, the same writer overwrites.

    Raises OSError, which names ``path``, if it cannot be written.
    """
    target = Path(os.path.realpath(path))
    name = os.getpid() if writer is None else writer
    partial = target.with_name(f".{target.name}.{name}.partial")
    direct = target.exists() and not target.is_file()
    try:
        yield target if direct else partial
        if not direct:
            partial.replace(target)
    except BaseException as error:
        if not direct:
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            # Errors of write() name no file, others the one beside.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def check_folder(path: Path, argument: str) -> None:
    """Raise NotADirectoryError if ``path`` neither is a folder nor can become one.

    argument: what ``path`` was given as.
    """
    for each in (path, *path.parents):
        if each.exists():
            if not each.is_dir():
                raise NotADirectoryError(f"{argument}: {each} is a file; name a folder")
            return


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, as a whole or not at all."""
    with whole_file(path) as file:
        file.write_text(text)
