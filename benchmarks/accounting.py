"""What accounting costs: an epsilon in every step of a run, and a search for noise.

    python -m benchmarks.accounting

dp-accounting stands beside: its time for one epsilon, building what it composes included. Writes
``accounting.json`` and the table of the README, in CPU time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.report import markdown_table, rewrite_section
from dpkernels.privacy import (
    Poisson,
    WithoutReplacement,
    calibrate_noise_multiplier,
    gaussian_step,
    make_accountant,
)

_ROOT = Path(__file__).resolve().parent.parent
CALLS = 10_000
DELTA = 1e-5
WITHIN = 0.02
SETTINGS: list[tuple[float, Poisson | WithoutReplacement]] = [
    (0.6, Poisson(0.001)),
    (1.0, Poisson(0.01)),
    (1.5, Poisson(0.05)),
    (2.0, WithoutReplacement(100, 10_000)),
]


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of ``work`` in this process, which other processes hardly change."""
    start = time.process_time()
    work()
    return time.process_time() - start


def every_step(name: str, sigma: float, sampling: Poisson | WithoutReplacement) -> float:
    """Return the seconds of composing a step and asking for epsilon, on average over a run."""
    accountant, statement = make_accountant(name), gaussian_step(sigma, sampling)

    def run() -> None:
        for _ in range(CALLS):
            accountant.compose(statement)
            accountant.epsilon(DELTA, within=WITHIN)

    return seconds(run) / CALLS


def exact(name: str, sigma: float, sampling: Poisson | WithoutReplacement) -> float:
    """Return the seconds of one exact epsilon after a run, once its steps are known."""
    accountant = make_accountant(name)
    accountant.compose(gaussian_step(sigma, sampling), CALLS)
    accountant.epsilon(DELTA)
    return seconds(lambda: accountant.epsilon(DELTA))


def search(name: str, sampling: Poisson | WithoutReplacement) -> float:
    """Return the seconds of finding the noise for epsilon = 2."""
    return seconds(lambda: calibrate_noise_multiplier(2.0, DELTA, CALLS, sampling, accountant=name))


def peer(name: str, sigma: float, sampling: Poisson | WithoutReplacement) -> float | None:
    """Return the seconds of one epsilon by dp-accounting, None if it has none."""
    import dp_accounting
    from dp_accounting import pld, rdp

    if not isinstance(sampling, Poisson):
        return None
    step = dp_accounting.PoissonSampledDpEvent(sampling.rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = pld.PLDAccountant() if name == "pld" else rdp.RdpAccountant()
    return seconds(lambda: accountant.compose(step, CALLS).get_epsilon(DELTA))


def measure() -> list[dict[str, Any]]:
    """Return the milliseconds of every accountant and setting."""
    make_accountant("rdp")
    search("rdp", Poisson(0.1))  # imports
    found = []
    for name in ("rdp", "pld"):
        for sigma, sampling in SETTINGS:
            theirs = peer(name, sigma, sampling)
            found.append(
                {
                    "accountant": name,
                    "noise_multiplier": sigma,
                    "sampling": str(sampling),
                    "each_step_ms": 1e3 * every_step(name, sigma, sampling),
                    "exact_ms": 1e3 * exact(name, sigma, sampling),
                    "search_ms": 1e3 * search(name, sampling),
                    "dp_accounting_ms": None if theirs is None else 1e3 * theirs,
                }
            )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return it in Markdown."""
    header = [
        "accountant and step",
        f"each of {CALLS:,} steps, to {WITHIN:.0%}",
        "one exact epsilon",
        "search for sigma",
        "dp-accounting, one epsilon",
    ]
    rows = []
    for one in found:
        theirs = one["dp_accounting_ms"]
        rows.append(
            [
                f"{one['accountant']}, sigma {one['noise_multiplier']}, {one['sampling']}",
                f"{one['each_step_ms']:.3f} ms",
                f"{one['exact_ms']:.2f} ms",
                f"{one['search_ms']:.0f} ms",
                "" if theirs is None else f"{theirs:.0f} ms",
            ]
        )
    return markdown_table(header, rows)


def main() -> None:
    """Measure, print, and write the results and the README's table."""
    logging.disable(logging.WARNING)  # of orders that dp-accounting leaves out
    where = provenance.collect(torch.device("cpu"))
    found = measure()
    print(table(found))
    text = json.dumps({"where": where, "results": found}, indent=1)
    (_ROOT / "benchmarks" / "results" / "accounting.json").write_text(f"{text}\n")
    rewrite_section(_ROOT / "README.md", "accounting", table(found))


if __name__ == "__main__":
    main()
