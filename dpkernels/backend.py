"""Which implementation of an operation runs, and why.

An operation has one schema, ``dpkernels::<name>``, and up to four implementations:

``reference``  plain PyTorch; any device, any dtype; also what the dispatcher falls back to.
``cpp``        compiled C++ for CPU tensors, registered by ``dpkernels._C``.
``triton``     Triton for CUDA and HIP tensors, or CPU tensors under ``TRITON_INTERPRET=1``.
``cuda``       hand-written CUDA, registered by a CUDA build of ``dpkernels._C``.

The choice is made by device and dtype. ``use_backend("...")`` (one block, one thread) and the
environment variable ``DPKERNELS_BACKEND`` (the whole process) override it, and an override that
cannot be served raises ``BackendUnavailable`` with the reason: nothing falls back in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

BACKENDS = ("reference", "cpp", "triton", "cuda")

# What is tried for a device, best first; devices that are not named get the reference.
_PREFERENCE = {"cpu": ("cpp", "reference"), "cuda": ("cuda", "triton", "reference")}

_LIBRARY = torch.library.Library("dpkernels", "FRAGMENT")


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot serve the call; the message says why."""


def _load_extension() -> tuple[ModuleType | None, str]:
    """Return ``dpkernels._C``, or None and the reason why it is not there.

    An extension that exists and does not load (built for another torch, say) is an error:
    falling back to the reference would hide a broken installation behind a slow one.
    """
    if importlib.util.find_spec("dpkernels._C") is None:
        return None, (
            "dpkernels._C is not built; install again with a C++ compiler and DPKERNELS_BUILD "
            "unset or 'cpu'"
        )
    try:
        module = importlib.import_module("dpkernels._C")
        # Another torch may load it and still have other data structures behind the same names.
        built_for = module.build_config()["torch"]
        if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
            raise ImportError(f"it was built for torch {built_for}")
    except ImportError as error:
        raise ImportError(
            f"dpkernels._C exists but does not load with torch {torch.__version__}: {error}. "
            "Build it again for this torch (pip install --no-build-isolation --force-reinstall "
            "--no-deps .), or install without it (DPKERNELS_BUILD=none)."
        ) from error
    return module, ""


extension, _EXTENSION_MISSING = _load_extension()
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Operation:
    """One operation of the library: its schema's name and what implements it.

    ``dtypes`` are those that the compiled implementations take; the reference takes any.
    ``triton`` imports its module on the first call, so that ``import dpkernels`` does not.
    """

    name: str
    dtypes: frozenset[torch.dtype]
    overload: Callable[..., Any]
    reference: Callable[..., Any]
    triton: Callable[..., Any] | None = None
    has_cpp: bool = False
    has_cuda: bool = False
    # What served before, by request, device and dtype: all that decides is fixed at import.
    served: dict[tuple[str | None, torch.device, torch.dtype], Callable[..., Any]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def why_not(self, backend: str, device_type: str, dtype: torch.dtype | None) -> str | None:
        """Return the reason why ``backend`` cannot serve such tensors, or None if it can."""
        if backend == "reference":
            return None
        if dtype is not None and dtype not in self.dtypes:
            wanted = ", ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"{dtype} is not one of {wanted}; the reference takes it"
        if backend == "cpp":
            return self._why_not_cpp(device_type)
        if backend == "triton":
            return self._why_not_triton(device_type)
        return self._why_not_cuda(device_type)

    def _why_not_cpp(self, device_type: str) -> str | None:
        if extension is None:
            return _EXTENSION_MISSING
        if not self.has_cpp:
            return "this operation has no compiled CPU implementation"
        if device_type != "cpu":
            return f"it runs on CPU tensors, these are on {device_type}"
        return None

    def _why_not_triton(self, device_type: str) -> str | None:
        if self.triton is None:
            return "this operation has no Triton implementation"
        if not _TRITON_INSTALLED:
            return "triton is not installed (pip install triton)"
        if device_type == "cuda" or (device_type == "cpu" and _TRITON_INTERPRETED):
            return None
        if device_type == "cpu":
            return "it runs on CUDA and HIP tensors; CPU tensors need TRITON_INTERPRET=1 at start"
        return f"it runs on CUDA and HIP tensors, these are on {device_type}"

    def _why_not_cuda(self, device_type: str) -> str | None:
        if extension is None:
            return _EXTENSION_MISSING
        if not self.has_cuda:
            return "this operation has no hand-written CUDA implementation in this build"
        if device_type != "cuda":
            return f"it runs on CUDA tensors, these are on {device_type}"
        return None

    def implementation(self, backend: str, device_type: str) -> Callable[..., Any]:
        """Return what to call for ``backend``, which ``why_not`` found able to serve the call.

        Compiled kernels go through the dispatcher, so that ``torch.compile`` sees one opaque
        operator; the reference is plain PyTorch, so the compiler may look inside.
        """
        if backend == "reference":
            return self.reference
        if backend == "triton" and (device_type == "cpu" or self.has_cuda):
            assert self.triton is not None
            return self.triton
        return self.overload


_operations: dict[str, Operation] = {}


def register(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    dtypes: frozenset[torch.dtype],
    triton: str | None = None,
) -> Operation:
    """Define ``dpkernels::<schema>`` and its implementations; return the operation.

    schema: name, arguments and returns, as ``torch.library.Library.define`` takes them.
    reference: plain PyTorch, same arguments; the fallback of every device without a kernel.
    fake: same arguments, returns empty tensors of the right shape (for ``torch.compile``).
    dtypes: what the ``cpp``, ``triton`` and ``cuda`` implementations take.
    triton: ``"module:function"``, imported when it is first called.
    """
    name = schema.split("(")[0].strip()
    qualified = f"dpkernels::{name}"
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    has_cuda = extension is not None and has_kernel(qualified, "CUDA")
    triton_function = None if triton is None else _imported_on_call(triton)
    if triton_function is not None and not has_cuda and _TRITON_INSTALLED:
        _LIBRARY.impl(name, triton_function, "CUDA")
    operation = Operation(
        name=name,
        dtypes=dtypes,
        overload=getattr(torch.ops.dpkernels, name).default,
        reference=reference,
        triton=triton_function,
        has_cpp=extension is not None and has_kernel(qualified, "CPU"),
        has_cuda=has_cuda,
    )
    _operations[name] = operation
    return operation


def _imported_on_call(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args)

    return call


class _Override(threading.local):
    """The backend asked for in this thread (torch.compile can guard on it)."""

    name: str | None = None


_override = _Override()


def _known(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: no backend {name!r}; there are {', '.join(BACKENDS)}")
    return name


_FROM_ENVIRONMENT = os.environ.get("DPKERNELS_BACKEND") or None
if _FROM_ENVIRONMENT is not None:
    _known(_FROM_ENVIRONMENT, "DPKERNELS_BACKEND")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Serve every operation in the block from one backend, in this thread; raise where it cannot.

    Wins over ``DPKERNELS_BACKEND``. Blocks nest; the inner one holds.
    """
    before = _override.name
    _override.name = _known(name, "use_backend")
    try:
        yield
    finally:
        _override.name = before


def select(operation: Operation, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the implementation that serves tensors on ``device`` of ``dtype``.

    Raises BackendUnavailable if one was asked for by name and cannot.
    """
    requested = _override.name or _FROM_ENVIRONMENT
    if torch.compiler.is_compiling():  # the compiler would guard on all of the dictionary
        backend = _choose(operation, requested, device.type, dtype)
        return operation.implementation(backend, device.type)
    # With cold caches every attribute counts: ``device.type`` alone takes 5 us, deciding again 50.
    key = (requested, device, dtype)
    run = operation.served.get(key)
    if run is None:
        backend = _choose(operation, requested, device.type, dtype)
        run = operation.served[key] = operation.implementation(backend, device.type)
    return run


def _choose(
    operation: Operation, requested: str | None, device_type: str, dtype: torch.dtype
) -> str:
    if requested is not None:
        reason = operation.why_not(requested, device_type, dtype)
        if reason is not None:
            raise BackendUnavailable(
                f"{operation.name}: backend '{requested}' was asked for and cannot serve "
                f"{dtype} tensors on {device_type}: {reason}"
            )
        return requested
    for backend in _PREFERENCE.get(device_type, ()):
        if operation.why_not(backend, device_type, dtype) is None:
            return backend
    return "reference"


@dataclass(frozen=True)
class Explanation:
    """What would serve one operation on one kind of tensor.

    chosen: the backend, or None where the one asked for by name cannot serve it.
    reasons: for every other backend, why it is not the one.
    """

    operation: str
    device: str
    dtype: torch.dtype
    chosen: str | None
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.operation} on {self.device}, {self.dtype}: {self.chosen or 'nothing'}"]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.reasons.items()]
        return "\n".join(lines)


def operations() -> tuple[str, ...]:
    """Return the names of all registered operations."""
    return tuple(_operations)


def explain(
    name: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Explanation:
    """Say which backend serves operation ``name`` for such tensors now, and why not the others.

    ``device`` need not be present: the answer is about tensors that would be there.
    """
    if name not in _operations:
        raise ValueError(f"explain: no operation {name!r}; there are {', '.join(_operations)}")
    operation = _operations[name]
    device_type = torch.device(device).type
    unable = {b: operation.why_not(b, device_type, dtype) for b in BACKENDS}
    requested = _override.name or _FROM_ENVIRONMENT
    if requested is not None:
        chosen = requested if unable[requested] is None else None
        otherwise = f"'{requested}' was asked for by name"
    else:
        order = (*_PREFERENCE.get(device_type, ()), "reference")
        chosen = next(b for b in order if unable[b] is None)
        otherwise = f"'{chosen}' comes first on {device_type}"
    reasons = {b: unable[b] or otherwise for b in BACKENDS if b != chosen}
    return Explanation(name, device_type, dtype, chosen, reasons)
