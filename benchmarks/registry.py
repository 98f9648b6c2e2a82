"""What is measured: cases, and the forms that compete in each.

A room is a module in ``benchmarks/cases`` with one function, ``cases(device, quick)``, that yields
its cases; adding the file registers it. ``quick`` asks for small sizes.
"""

from __future__ import annotations

import fnmatch
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

import benchmarks.cases

Outputs = list[Tensor]
Inputs = list[Tensor]
# What bounds a case on any machine: reading memory, reading and writing it in place, or a product.
Bound = Literal["read", "update", "gemm"]


@dataclass(frozen=True)
class Form:
    """One way to write an operation: ``run(*arguments(inputs))`` is what is timed.

    run: returns the outputs, which may be buffers that it was given.
    arguments: not timed; allocates what the form may keep from call to call. Outputs start as
        NaN, so that an element that is never written fails the check.
    eager: False for a form that only pays under ``torch.compile``; it is not timed without.
    compilable: False where ``torch.compile`` would have nothing to look into.
    """

    name: str
    run: Callable[..., Outputs]
    arguments: Callable[[Inputs], tuple[Any, ...]]
    eager: bool = True
    compilable: bool = True


@dataclass(frozen=True)
class Target:
    """What a case is expected to reach.

    ratio: at least so many times as fast as ``against``.
    against: the name of a plain form, or None for the fastest of them.
    percent_of_bound: at least so much of what the machine achieves.
    memory_fraction: at most this part of the extra memory of ``against``.
    megabytes: at most so much extra memory.
    """

    ratio: float | None = None
    against: str | None = None
    percent_of_bound: float | None = None
    memory_fraction: float | None = None
    megabytes: float | None = None

    def __bool__(self) -> bool:
        """Return whether anything is expected."""
        wanted = (self.ratio, self.percent_of_bound, self.memory_fraction, self.megabytes)
        return any(value is not None for value in wanted)


@dataclass(frozen=True)
class Case:
    """One operation on one size.

    op: the operation's name in ``dpkernels.backend.operations()``.
    name: unique; what the table shows.
    make_inputs: inputs on a device from a generator of that device. Nobody writes to them.
    bytes_moved, flops: what the operation needs at least; rates are counted from these.
    bound: what limits it; percentages are of that.
    ours: the public function of dpkernels.
    plain: PyTorch forms, each as good as it gets. The error of the first sets what is allowed.
    truth: the outputs in float64.
    same_dtype: plain PyTorch outputs that set the allowed error, where the first plain form
        computes something else (another random stream).
    check_plain: for plain forms that cannot equal ``truth``: a reason to refuse, or None.
    raised: what outputs may be high by on purpose, as a part of the largest of them: ghost norms
        are returned with a bound of their rounding error on top.
    """

    op: str
    name: str
    dtype: torch.dtype
    make_inputs: Callable[[torch.device, torch.Generator], Inputs]
    bytes_moved: int
    flops: int
    bound: Bound
    ours: Form
    plain: tuple[Form, ...]
    truth: Callable[[Inputs], Outputs]
    parameters: dict[str, Any] = field(default_factory=dict)
    same_dtype: Callable[[Inputs], Outputs] | None = None
    check_plain: Callable[[Inputs, Outputs], str | None] | None = None
    raised: float = 0.0
    target: Target = Target()


class Room(Protocol):
    """A module of ``benchmarks.cases``."""

    def cases(self, device: torch.device, quick: bool) -> Iterable[Case]:
        """Yield the room's cases."""
        ...


def all_cases(device: torch.device, *, quick: bool = False, only: str = "*") -> list[Case]:
    """Return the cases of every room whose name or operation matches the pattern ``only``.

    Raises ValueError for two cases of one name.
    """
    modules = sorted(module.name for module in pkgutil.iter_modules(benchmarks.cases.__path__))
    rooms = [importlib.import_module(f"benchmarks.cases.{name}") for name in modules]
    found = [case for room in rooms for case in cast(Room, room).cases(device, quick)]
    names = [case.name for case in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"all_cases: names must be unique, got twice: {', '.join(repeated)}")
    return [c for c in found if fnmatch.fnmatch(c.name, only) or fnmatch.fnmatch(c.op, only)]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Return the case's inputs, the same in every run."""
    return case.make_inputs(device, torch.Generator(device).manual_seed(0))


def poisoned(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a buffer of NaN on the device of ``like``: its pages are there, its values are not."""
    return torch.full(shape, float("nan"), dtype=dtype, device=like.device)
