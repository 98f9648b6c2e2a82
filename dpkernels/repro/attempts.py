"""Where, when and beside what a training ran, written down as it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkernels.repro import provenance
from dpkernels.whole_file import write_text

FILE = "attempts.json"


@dataclass(frozen=True)
class Attempt:
    """One piece of a training, from its beginning or from a checkpoint.

    seconds: on the clock; None if it was killed before it could say.
    jobs: how many trainings of the same command ran at once; None if that was not recorded.
    others: processors that other processes kept busy on average; None where nobody counts them.
    origin: commit, processor, threads, versions, time.
    """

    seconds: float | None
    jobs: int | None
    others: float | None
    origin: dict[str, Any]

    @classmethod
    @contextmanager
    def recorded(cls, folder: Path, *, jobs: int, goes_on: bool) -> Iterator[None]:
        """Record what runs inside in ``folder``; forget earlier ones unless it ``goes_on``.

        It is written before the first step: a kill leaves no training of an unknown commit.
        """
        earlier = read_attempts(folder) if goes_on else ()
        attempt = cls(None, jobs, None, provenance.collect())
        _write(folder, (*earlier, attempt))
        begun, busy = time.perf_counter(), _busy_elsewhere()
        try:
            yield
        finally:
            seconds, since = time.perf_counter() - begun, _busy_elsewhere()
            others = None
            if busy is not None and since is not None:
                # Ticks are rounded, so that the difference of two counts can be below nothing.
                others = max(0.0, since - busy) / max(seconds, 1e-9)
            done = dataclasses.replace(attempt, seconds=seconds, others=others)
            _write(folder, (*earlier, done))


def read_attempts(folder: Path) -> tuple[Attempt, ...]:
    """Return the attempts that ``folder`` has a record of, the first one first."""
    file = folder / FILE
    if not file.exists():
        return ()
    found = []
    for one in json.loads(file.read_text()):
        named = {name: one.pop(name, None) for name in ("seconds", "jobs", "others")}
        found.append(Attempt(**named, origin=one))
    return tuple(found)


def _write(folder: Path, attempts: tuple[Attempt, ...]) -> None:
    rows = []
    for attempt in attempts:
        row = dataclasses.asdict(attempt)
        rows.append({**row.pop("origin"), **row})
    write_text(folder / FILE, json.dumps(rows, indent=2) + "\n")


def _busy_elsewhere() -> float | None:
    """Return the processor seconds of all processes but this one since the machine began.

    None where the system does not count them in ``/proc/stat``.
    """
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *interrupts_and_stolen = map(int, first.split()[1:9])
    ticks = user + nice + system + sum(interrupts_and_stolen)
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
