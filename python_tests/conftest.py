"""Fixtures of every test: the backends, poisoned memory, thread counts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Both are read once, when triton and dpkernels are imported.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.pop("DPKERNELS_BACKEND", None)

import pytest
import torch

import dpkernels
from dpkernels import backend as backends
from python_tests import hypothesis_profiles

hypothesis_profiles.register()


def instruction_sets() -> list[str]:
    """Return the instruction sets that the extension can use on this CPU; none if not built."""
    if backends.extension is None:
        return []
    features = backends.extension.cpu_features()
    return ["portable", *(isa for isa in ("avx2", "avx512") if features[isa])]


CPP = [f"cpp-{isa}" for isa in instruction_sets()] or ["cpp"]


@contextmanager
def running_on(name: str, operations: Sequence[str]) -> Iterator[None]:
    """Run the block, which calls these operations, on a backend.

    name: ``reference``, ``triton`` or ``cpp-<instruction set>``.

    Skips the test with the reason if the backend is not there; fails it in CI, where all are.
    """
    kind, _, isa = name.partition("-")
    with dpkernels.use_backend(kind):
        for operation in operations:
            reason = dpkernels.explain(operation).reasons.get(kind)
            if reason is not None:
                unavailable = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
                unavailable(f"{operation} on {name}: {reason}")
        if not isa:
            yield
            return
        assert backends.extension is not None
        before = backends.extension.cpu_features()["active"]
        backends.extension.set_isa(isa)
        try:
            yield
        finally:
            backends.extension.set_isa(before)


def operations_of(request: pytest.FixtureRequest) -> Sequence[str]:
    """Return what the test's module names as its ``OPERATIONS``."""
    operations: Sequence[str] = request.module.OPERATIONS
    return operations


@pytest.fixture(params=["reference", *CPP, "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once on every backend, and on ``cpp`` with every instruction set."""
    with running_on(request.param, operations_of(request)):
        yield request.param


@pytest.fixture(params=CPP)
def cpp(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on ``cpp`` with every instruction set."""
    with running_on(request.param, operations_of(request)):
        yield request.param


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test with several numbers of threads, more than there are cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill freshly allocated tensors with NaN (in C++ too), so that reading one shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before)
