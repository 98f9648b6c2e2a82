"""Trainings in processes of their own, several at once or one alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from dpkernels.repro.trials import Task, Trial, read
from dpkernels.repro.worker import MISSING, STOPPED, encoded
from dpkernels.train.formats import MissingData

LOG = "log.txt"
Outcome = Trial | Exception
Report = Callable[[Task, Outcome], None]


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(tasks: Sequence[Task], report: Report, *, jobs: int) -> None:
    """Train ``tasks`` in their order, ``jobs`` at once, each with its share of the processors.

    report: called with each task as it ends, and with its trial or with what went wrong; one that
    went wrong does not stop the others.

    Raises KeyboardInterrupt after Ctrl-C, once all have written their checkpoints; the second
    Ctrl-C does not wait for them.
    """
    crew = _Crew(jobs)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(crew.train, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                report(futures[future], future.result())
        except BaseException:
            crew.stop()
            try:
                pool.shutdown(cancel_futures=True)
            except KeyboardInterrupt:
                crew.kill()
            raise


class _Crew:
    """The processes that train now."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._threads = jobs, max(1, cores() // jobs)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped, self._lock = False, threading.Lock()

    def train(self, task: Task) -> Outcome:
        """Wait for the training of ``task``; return what came of it."""
        done = read(task)
        if done is not None:  # without seconds of imports
            return done
        task.folder.mkdir(parents=True, exist_ok=True)
        argument = encoded(task, jobs=self._jobs, threads=self._threads)
        # Another command may have its log there, and what it says of earlier attempts is kept.
        with (task.folder / LOG).open("ab") as log:
            begins = log.tell()
            with self._lock:
                if self._stopped:
                    return RuntimeError("stopped before it began")
                process = subprocess.Popen(
                    [sys.executable, "-m", "dpkernels.repro.worker", argument],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
                    # A terminal's Ctrl-C is for this process alone, which passes it on once: the
                    # second one would not wait for the end of a step.
                    start_new_session=True,
                )
                self._running.add(process)
            status = process.wait()
            with self._lock:
                self._running.discard(process)
                _close_input(process)
        return _outcome(task, status, begins)

    def stop(self) -> None:
        """Let every training write its checkpoint and end, and none begin."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _close_input(process)

    def kill(self) -> None:
        """End every training at once."""
        with self._lock:
            for process in self._running:
                process.kill()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _outcome(task: Task, status: int, begins: int) -> Outcome:
    """Return what came of ``task``; begins: where its log does, in bytes."""
    if status == 0:
        trial = read(task)
        return trial if trial is not None else RuntimeError("it ended without a report")
    if status == STOPPED:
        return RuntimeError("stopped")
    log = task.folder / LOG
    own = log.read_bytes()[begins:].decode(errors="replace")
    lines = own.strip().splitlines() or [f"status {status}"]
    if status == MISSING:
        return MissingData(lines[-1])
    return RuntimeError(f"{lines[-1]} (all of it: {log})")
