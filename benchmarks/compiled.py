"""``torch.compile`` of a plain form, or the reason why there is none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.registry import Outputs


class CompileTimeout(Exception):
    """The compiler took longer than it was given."""


def compile_form(run: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Return ``run``, to be compiled for the shapes of its first call."""
    import torch._inductor.config as inductor

    # Worker processes would compete for the cores with what is measured.
    inductor.compile_threads = 1
    compiled: Callable[..., Outputs] = torch.compile(run, dynamic=False)
    return compiled


def forget_compiled() -> None:
    """Drop what was compiled for earlier cases: it would count towards the recompilation limit."""
    torch._dynamo.reset()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise CompileTimeout in the block after ``seconds``, in the main thread of a Unix process."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() != threading.main_thread():
        yield
        return

    def expire(*_: Any) -> None:
        raise CompileTimeout(f"not compiled within {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
