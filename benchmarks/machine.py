"""What this machine achieves: memory bandwidth, products, PyTorch's own normals.

A bound is measured as the best of several plain forms. ``probes`` gives them for a case's own size
and are timed in the case's own rounds: a case that fits in the cache is held to the cache's
bandwidth, and whatever slows the machine slows the bound too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.registry import Bound
from benchmarks.timing import Budget, Call, Spread, measure

# Beyond this no cache helps, and a larger buffer would only take longer.
_LARGEST_BUFFER = 256 * 2**20
GEMM_SIZE = 1536
_NORMALS = 1 << 22


@dataclass(frozen=True)
class Probe:
    """A call that does nothing but what a bound is about: ``amount`` bytes or flops of it."""

    name: str
    call: Call
    amount: float


@dataclass(frozen=True)
class Rate:
    """The best of several probes: ``per_second`` is GB/s, GFLOP/s or G normals/s."""

    best: str
    per_second: float


def probes(
    bound: Bound, bytes_moved: int, device: torch.device, gemm_size: int = GEMM_SIZE
) -> list[Probe]:
    """Return the probes of ``bound`` that move about ``bytes_moved`` bytes.

    gemm_size: rows and columns of the matrices whose product is the bound of ``gemm``.
    """
    if bound == "gemm":
        return [_gemm(gemm_size, device)]
    if bound == "read":
        return _reads(min(bytes_moved, _LARGEST_BUFFER), device)
    return _updates(min(bytes_moved, _LARGEST_BUFFER), device)


def _reads(bytes_moved: int, device: torch.device) -> list[Probe]:
    x = torch.ones(max(1, bytes_moved // 4), device=device)
    rows = x.view(-1, 1024) if x.numel() % 1024 == 0 else x.view(1, -1)
    size = float(4 * x.numel())
    return [
        Probe("sum", lambda: x.sum(), size),
        Probe("dot", lambda: torch.dot(x, x), size),
        Probe("max", lambda: x.amax(), size),
        Probe("sum of rows", lambda: rows.sum(1), size),
    ]


def _updates(bytes_moved: int, device: torch.device) -> list[Probe]:
    """In place (n read, n written), copy (the same), and triad (2 n read, n written)."""
    x = torch.ones(max(1, bytes_moved // 8), device=device)
    y, z = torch.ones_like(x), torch.ones_like(x)
    size = float(4 * x.numel())
    return [
        Probe("x.mul_(1)", lambda: x.mul_(1.0), 2 * size),
        Probe("x.copy_(y)", lambda: x.copy_(y), 2 * size),
        Probe("triad", lambda: torch.add(x, y, alpha=0.5, out=z), 3 * size),
    ]


def _gemm(size: int, device: torch.device) -> Probe:
    a, b = (torch.ones(size, size, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return Probe("mm", lambda: torch.mm(a, b, out=out), 2.0 * size**3)


def _normals(device: torch.device) -> Probe:
    x = torch.empty(_NORMALS, device=device)
    return Probe("normal_", lambda: x.normal_(), float(_NORMALS))


def best_rate(candidates: list[Probe], milliseconds: list[list[float]]) -> Rate:
    """Return the rate of the fastest probe, from the median of its times."""
    rates = [
        Rate(probe.name, probe.amount / Spread.of(times).median / 1e6)
        for probe, times in zip(candidates, milliseconds, strict=True)
    ]
    return max(rates, key=lambda rate: rate.per_second)


def survey(device: torch.device, budget: Budget) -> dict[str, Rate]:
    """Measure ``read`` and ``update`` in GB/s, ``gemm`` in GFLOP/s, ``normals`` in G/s."""
    kinds = {
        "read": probes("read", _LARGEST_BUFFER, device),
        "update": probes("update", _LARGEST_BUFFER, device),
        "gemm": probes("gemm", 0, device),
        "normals": [_normals(device)],
    }
    rates = {}
    for kind, candidates in kinds.items():
        times = measure([probe.call for probe in candidates], budget, device)
        rates[kind] = best_rate(candidates, times)
    return rates
