"""What a client of FedFisher uploads, in no more bytes than FedAvg's: weights and Fisher as bytes.

A payload is, little-endian: "FF", version, flags (1: paper's form; 2: the layout is not in it);
bits of weights, factors, and of both sides of a diagonal's pair, one byte each; the rank, 4 bytes;
the number of records, 8; the layout or 8 bytes of its hash; every tensor of the state; every tensor
of F. All lengths follow from the header, and one other than that is refused before anything is
allocated. Nothing here is private, as FedFisher is not.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.merging.budget import (
    DIGEST_BYTES,
    FORMS,
    Form,
    Settings,
    fedavg_bytes,
    paper_settings,
    parts,
    payload_bytes,
    solve,
)
from dpkernels.federated.merging.layout import Layout
from dpkernels.federated.merging.packing import Reader
from dpkernels.fisher.information import Diagonal, Fisher, Kronecker

_HEADER = "<2sBBBBBBIQ"
_MAGIC = b"FF"
_VERSION = 1
_PAPER, _SHARED = 1, 2

# Above, products of two roots would not be float32 numbers at the server.
_LARGEST = 2.0**126

# Bytes of work for each decoded element: codes, float64 values and the float32 result.
_WORK = 32


@dataclass(frozen=True)
class Upload:
    """One client's upload. budget: what it was made for, in bytes; settings: how."""

    payload: bytes
    budget: int
    settings: Settings

    @property
    def bytes(self) -> int:
        """Its length."""
        return len(self.payload)


def compress(
    state: Mapping[str, Tensor],
    fisher: Fisher,
    *,
    budget: int | None = None,
    form: Form = "symmetric",
    s_q: int | None = None,
    layout: Layout | None = None,
) -> Upload:
    """Return weights and Fisher as bytes.

    state: floating-point tensors, finite. fisher: of some or all of them; factors symmetric and
        positive semidefinite.
    budget: bytes that the payload may take, header and scales included; None: FedAvg's, 4 for each
        value of the state.
    form: ``symmetric``: as many bits as fit, ``budget.solve``. ``paper``: as FedFisher's Appendix
        C, whose formula counts no scales: diagonals exceed the budget by 8 bytes a layer and the
        header, and nothing keeps the factors that come back positive semidefinite.
    s_q: the paper's, of its singular vectors; 4 if None, as it chose from 2, 4 and 6 (Table 5).
    layout: what the server has already, ``Layout.of(state, fisher)`` of its own; the payload then
        has no names and shapes, and ``decompress`` needs it. None: they are in it.

    About 11 n^3 flops for each factor ``[n, n]``. Raises ValueError for values that are not finite
    or beyond 2^126, for shapes that do not fit together, another layout, or a budget that is too
    small.
    """
    if form not in FORMS:
        raise ValueError(f"compress: form must be one of {', '.join(FORMS)}, got {form!r}")
    found = Layout.of(state, fisher)
    if s_q is not None and form != "paper":
        raise ValueError(f"compress: s_q is of form 'paper', got {s_q} with {form!r}")
    if layout is not None and layout.encode() != found.encode():
        raise ValueError("compress: layout must be of this state and Fisher, got another")
    _check_state(state)
    tensors = _tensors(found, fisher)
    if budget is None:
        budget = fedavg_bytes(found)
    shared = layout is not None
    if form == "symmetric":
        settings = solve(found, budget, shared=shared)
    else:
        settings = paper_settings(found, budget, 4 if s_q is None else s_q)
    state_parts, fisher_parts = parts(found, settings)
    pieces = [_header(settings, fisher.records, shared)]
    pieces.append(found.digest() if shared else found.encode())
    pieces += [part.encode(x) for part, x in zip(state_parts, state.values(), strict=True)]
    pieces += [part.encode(x) for part, x in zip(fisher_parts, tensors, strict=True)]
    return Upload(b"".join(pieces), budget, settings)


def decompress(
    payload: bytes, *, layout: Layout | None = None, limit: int = 1 << 30
) -> tuple[dict[str, Tensor], Fisher]:
    """Return the state and the Fisher of a payload, float32 on the CPU.

    layout: needed for a payload without one, and compared with it otherwise: give it wherever the
        server knows the model, so that a client cannot choose shapes.
    limit: bytes of memory that decoding may take, about; larger ones are refused unread.

    In our form factors are L L^T + D, D >= 0, computed in float64 and rounded to float32: positive
    semidefinite but for that rounding, whatever the bytes are. Raises ValueError, and nothing else,
    for bytes that ``compress`` never writes, values that are not float32 numbers, another layout,
    or more than ``limit``.
    """
    reader = Reader(payload)
    settings, records, shared = _read_header(reader)
    if shared:
        if layout is None:
            raise ValueError("decompress: this payload has no layout; pass the one it was made for")
        found, digest = layout, reader.take(DIGEST_BYTES)
        same = digest == layout.digest()
    else:
        found = Layout.decode(reader)
        same = layout is None or layout.encode() == found.encode()
    if not same:
        raise ValueError("decompress: this payload was made for another layout")
    wanted = payload_bytes(found, settings, shared=shared)
    if len(payload) != wanted:
        raise ValueError(f"decompress: must be {wanted} bytes by its header, got {len(payload)}")
    memory = _WORK * _elements(found)
    if memory > limit:
        raise ValueError(f"decompress: would take {memory:,} bytes of memory, over {limit:,}")
    state_parts, fisher_parts = parts(found, settings)
    state = {
        name: _rounded(name, part.decode(reader))
        for name, part in zip(found.shapes, state_parts, strict=True)
    }
    layers: dict[str, Kronecker | Diagonal] = {}
    decoders = iter(fisher_parts)
    for layer in found.layers:
        first = _rounded(layer.name, next(decoders).decode(reader))
        if layer.kind == "kronecker":
            second = _rounded(layer.name, next(decoders).decode(reader))
            layers[layer.name] = Kronecker(layer.weight, layer.bias, first, second)
        else:
            layers[layer.name] = Diagonal(layer.parameters[0], first.clamp(min=0))
    return state, Fisher(layers, dict(found.without), records)


def _header(settings: Settings, records: int, shared: bool) -> bytes:
    flags = _PAPER * (settings.form == "paper") | _SHARED * shared
    bits = (settings.weights, settings.factors, *settings.pair)
    if not 0 <= records < 1 << 64:
        raise ValueError(f"compress: records must be 0 to 2^64 - 1, got {records}")
    return struct.pack(_HEADER, _MAGIC, _VERSION, flags, *bits, settings.rank, records)


def _read_header(reader: Reader) -> tuple[Settings, int, bool]:
    magic, version, flags, weights, factors, first, second, rank, records = reader.unpack(_HEADER)
    if magic != _MAGIC or version != _VERSION or flags & ~(_PAPER | _SHARED):
        raise ValueError(
            f"decompress: must start with {_MAGIC!r} and version {_VERSION}, got {magic!r}, "
            f"version {version} and flags {flags}"
        )
    form: Form = "paper" if flags & _PAPER else "symmetric"
    return Settings(form, weights, factors, rank, (first, second)), records, bool(flags & _SHARED)


def _check_state(state: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"compress: state[{name!r}] must be floating point, got {tensor.dtype}; leave "
                "it out"
            )
        _check_values(f"state[{name!r}]", tensor)


def _tensors(layout: Layout, fisher: Fisher) -> list[Tensor]:
    """Return the tensors of F in the order of its parts, checked."""
    tensors: list[Tensor] = []
    for entry, layer in zip(layout.layers, fisher.layers.values(), strict=True):
        if isinstance(layer, Kronecker):
            sizes = layout.factors(entry)
            named = {f"{entry.name}'s a": layer.a, f"{entry.name}'s g": layer.g}
            shapes: tuple[tuple[int, ...], ...] = tuple((size, size) for size in sizes)
        else:
            named = {f"{entry.name}'s values": layer.values}
            shapes = (layout.shapes[layer.parameter],)
        for (name, tensor), shape in zip(named.items(), shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"compress: {name} must be {list(shape)}, got {list(tensor.shape)}"
                )
            _check_values(name, tensor)
            tensors.append(tensor)
        if isinstance(layer, Diagonal) and bool((layer.values < 0).any()):
            raise ValueError(
                f"compress: {entry.name}'s values must be >= 0, got {float(layer.values.min())}"
            )
    return tensors


def _check_values(name: str, tensor: Tensor) -> None:
    bad = int((~(tensor.abs() < _LARGEST)).sum())
    if bad:
        raise ValueError(
            f"compress: {name} must be finite and below 2^126, got {bad} of {tensor.numel()} "
            "values that are not; did training diverge?"
        )


def _elements(layout: Layout) -> int:
    """Return how many elements are decoded, in exact arithmetic."""
    count = layout.size
    for layer in layout.layers:
        if layer.kind == "kronecker":
            count += sum(size * size for size in layout.factors(layer))
        else:
            count += math.prod(layout.shapes[layer.parameters[0]])
    return count


def _rounded(name: str, values: Tensor) -> Tensor:
    rounded = values.to(torch.float32)
    if not bool(rounded.isfinite().all()):
        raise ValueError(f"decompress: {name} must be finite in float32, got values that are not")
    return rounded
