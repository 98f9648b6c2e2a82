"""Time several calls in one process, in turn, so that whatever slows the machine slows them all."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

Call = Callable[[], object]

# Fewer rounds than this give no quartiles worth printing; more than that, no narrower ones.
_FEWEST_ROUNDS = 11
_MOST_ROUNDS = 500


@dataclass(frozen=True)
class Spread:
    """Median and quantiles of a sample."""

    median: float
    p10: float
    p25: float
    p75: float
    p90: float
    count: int

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        """Return the quantiles of ``sample`` (linear interpolation)."""
        p10, p25, median, p75, p90 = np.percentile(sample, (10, 25, 50, 75, 90)).tolist()
        return cls(median, p10, p25, p75, p90, len(sample))


@dataclass(frozen=True)
class Budget:
    """How long to measure: ``seconds`` for each case, or exactly ``rounds`` if given."""

    seconds: float = 6.0
    rounds: int | None = None

    def rounds_for(self, seconds_per_round: float) -> int:
        """Return how many rounds fit."""
        if self.rounds is not None:
            return self.rounds
        fitting = int(self.seconds / max(seconds_per_round, 1e-9))
        return min(max(fitting, _FEWEST_ROUNDS), _MOST_ROUNDS)


def interleave(calls: Sequence[Call], rounds: int, device: torch.device) -> list[list[float]]:
    """Call each of ``calls`` once in every round; return the milliseconds of every call.

    The order is shuffled anew in every round, so that no call always follows the same one and finds
    the caches and threads as that one leaves them. Results are dropped inside the timed region:
    freeing what a form allocates is part of its cost.
    """
    milliseconds: list[list[float]] = [[] for _ in calls]
    time_one = _time_on_cuda if device.type == "cuda" else _time_on_cpu
    with _no_garbage_collection():
        for _ in range(rounds):
            for index in random.sample(range(len(calls)), len(calls)):
                milliseconds[index].append(time_one(calls[index]))
    return milliseconds


def measure(calls: Sequence[Call], budget: Budget, device: torch.device) -> list[list[float]]:
    """Warm up, then interleave ``calls`` for as many rounds as the budget allows."""
    interleave(calls, 1, device)
    second = interleave(calls, 1, device)
    rounds = budget.rounds_for(sum(times[0] for times in second) / 1e3)
    return interleave(calls, rounds, device)


def _time_on_cpu(call: Call) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6


def _time_on_cuda(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
