"""Text files that hold the old or the new whole, whenever they are looked at."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, beside it first: an interruption leaves no half of it.

    Two processes may write one path: it is that of the last.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
