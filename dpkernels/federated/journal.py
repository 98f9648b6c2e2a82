"""Rounds that were seen, noted before they are: what a killed server cannot forget."""

from __future__ import annotations

import json
import os
from pathlib import Path


class Journal:
    """A file with a line for every round that uploads or a sum were opened of.

    A checkpoint is written after a round. Whoever resumes from it counts the rounds that the
    journal has beyond it: they were seen, though what they taught is lost.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def note(self, index: int, stage: str) -> None:
        """Add round ``index`` of ``stage``; on the disk when it returns."""
        with self._path.open("a") as file:
            file.write(json.dumps([index, stage]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def beyond(self, index: int) -> list[tuple[int, str]]:
        """Return the rounds after ``index``, with the stage of each.

        A last line that is not whole was not on the disk, so its round was not seen.
        """
        if not self._path.exists():
            return []
        whole = [line for line in self._path.read_text().split("\n")[:-1] if line]
        return [(at, stage) for at, stage in map(json.loads, whole) if at > index]
