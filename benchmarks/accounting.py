"""What accounting costs: an epsilon in every step of a run, and a search for noise.

    python -m benchmarks.accounting

dp-accounting stands beside: its time for one epsilon, building what it composes included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dpkernels.privacy import (
    Poisson,
    WithoutReplacement,
    calibrate_noise_multiplier,
    gaussian_step,
    make_accountant,
)

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


def main() -> None:
    """Print a table in milliseconds."""
    logging.disable(logging.WARNING)  # of orders that dp-accounting leaves out
    make_accountant("rdp")
    search("rdp", Poisson(0.1))  # imports
    print(f"{CALLS:,} steps, delta = {DELTA:g}, milliseconds of CPU time")
    print(f"{'':64}{f'each step, {WITHIN:.0%}':>16}{'exact':>9}{'search':>9}{'dp-accounting':>15}")
    for name in ("rdp", "pld"):
        for sigma, sampling in SETTINGS:
            theirs = peer(name, sigma, sampling)
            times = [every_step(name, sigma, sampling), exact(name, sigma, sampling)]
            times.append(search(name, sampling))
            cells = f"{times[0] * 1e3:16.3f}{times[1] * 1e3:9.2f}{times[2] * 1e3:9.0f}"
            beside = "" if theirs is None else f"{theirs * 1e3:15.0f}"
            print(f"{f'{name}  sigma {sigma}  {sampling}':64}{cells}{beside}".rstrip())


if __name__ == "__main__":
    main()
