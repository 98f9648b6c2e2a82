"""``dpkernels calibrate``: noise, epsilon or steps, for each sampling and accountant."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from dpkernels.privacy.accountants import ACCOUNTANTS
from dpkernels.privacy.accountants.accountant import check_delta, check_epsilon, check_steps
from dpkernels.privacy.calibration import (
    UNREACHABLE,
    calibrate_noise_multiplier,
    calibrate_steps,
    epsilon_after,
)
from dpkernels.privacy.curve import epsilon_curve, plot, require_matplotlib
from dpkernels.privacy.mechanism import (
    Adjacency,
    Poisson,
    Sampling,
    Shuffled,
    WithoutReplacement,
    adjacency_of,
    gaussian_step,
)

PLOTS = (".png", ".pdf", ".svg")
SAMPLINGS = ("poisson", "without-replacement", "shuffled")
DESCRIPTION = """\
Find the noise multiplier that keeps to (epsilon, delta), or epsilon for a noise multiplier, or the
number of steps for both: of --epsilon, --noise-multiplier and --steps (or --epochs) give two. The
noise multiplier is the noise over the clipping norm. The table has every way to sample, so as to
show what it is worth: a shuffled batch has no amplification, and is accounted without."""


@dataclass(frozen=True)
class Row:
    """What one accountant says of one way to sample; ``error`` says why it cannot."""

    sampling: str
    adjacency: str
    accountant: str
    noise_multiplier: float | None = None
    steps: int | None = None
    epsilon: float | None = None
    error: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to ``parser``."""
    add = parser.add_argument
    add("--epsilon", type=float, help="the budget")
    add("--delta", type=float, required=True, help="less than 1 / number of records")
    add("--noise-multiplier", type=float, metavar="SIGMA", help="noise over the clipping norm")
    add("--steps", type=int, help="number of steps")
    add("--epochs", type=int, help="number of epochs, in place of --steps")
    add("--rate", type=float, help="share of the records in a batch, on average")
    add("--records", type=int, help="number of records, with --batch-size in place of --rate")
    add("--batch-size", type=int, help="(expected) size of a batch")
    add("--sampling", choices=SAMPLINGS, help="which one to plot, and star (the first)")
    add("--adjacency", choices=get_args(Adjacency), help="show only samplings accounted under it")
    add("--json", action="store_true", help="print JSON, for programs")
    add("--plot", metavar="FILE", type=Path, help="draw epsilon over steps (.png, .pdf, .svg)")


def run(options: argparse.Namespace) -> str:
    """Return what the command prints; draw the plot, whose folder is made if it is not there.

    Raises ValueError for arguments that do not make sense, OSError if the plot cannot be written.
    """
    samplings, steps = _settings(options)
    samplings, starred = _chosen(samplings, options)
    given = [options.epsilon, options.noise_multiplier, steps]
    if sum(value is not None for value in given) != 2:
        raise ValueError(
            "give two of --epsilon, --noise-multiplier and --steps (or --epochs): the third is "
            "what is found"
        )
    if options.plot:
        _check_plot(options.plot)
    rows = [
        _row(name, sampling, accountant, steps, options)
        for name, sampling in samplings.items()
        for accountant in _accountants(sampling)
    ]
    if options.plot:
        _plot(starred, samplings[starred], rows, options)
    if options.json:
        chosen = {"delta": options.delta, "sampling": starred}
        return json.dumps(chosen | {"rows": [asdict(row) for row in rows]}, indent=2)
    return _table(rows, starred, options)


def _settings(options: argparse.Namespace) -> tuple[dict[str, Sampling], int | None]:
    """Return every way to sample as the options have it, and the number of steps."""
    records, batch = options.records, options.batch_size
    if (records is None) != (batch is None) or (records is None) == (options.rate is None):
        raise ValueError("give either --rate, or both --records and --batch-size")
    if options.rate is not None:
        # The same share of some large number of records, rounded up.
        poisson, records = Poisson(options.rate), 10**9
        batch = math.ceil(options.rate * records)
    else:
        drawn = WithoutReplacement(batch, records)
        poisson = Poisson(drawn.batch / drawn.population)
    epoch = math.ceil(records / batch)
    if options.epochs is not None and options.steps is not None:
        raise ValueError("give --steps or --epochs, not both")
    steps = options.steps if options.epochs is None else options.epochs * epoch
    kinds = (poisson, WithoutReplacement(batch, records), Shuffled(epoch))
    return dict(zip(SAMPLINGS, kinds, strict=True)), steps


def _chosen(
    samplings: dict[str, Sampling], options: argparse.Namespace
) -> tuple[dict[str, Sampling], str]:
    """Return the samplings to show, those of the adjacency asked for, and the one to star."""
    wanted = options.adjacency
    shown = {
        name: sampling
        for name, sampling in samplings.items()
        if wanted in (None, adjacency_of(sampling))
    }
    starred = options.sampling or next(iter(shown))
    if starred not in shown:
        its_own = adjacency_of(samplings[starred])
        raise ValueError(
            f"--sampling {starred} is accounted under {its_own} adjacency, got --adjacency "
            f"{wanted}; leave one of them out"
        )
    return shown, starred


def _accountants(sampling: Sampling) -> list[str]:
    """Return those that account ``sampling``, tightest first: pld is exact without sampling."""
    return ["gaussian", "rdp"] if isinstance(sampling, Shuffled) else ["pld", "rdp"]


def _row(
    name: str, sampling: Sampling, accountant: str, steps: int | None, options: argparse.Namespace
) -> Row:
    epsilon, delta, sigma = options.epsilon, options.delta, options.noise_multiplier
    adjacency = adjacency_of(sampling)
    # What is wrong whatever the sampling is said once; what a row cannot reach, in the row.
    check_delta(delta)
    if sigma is not None:
        gaussian_step(sigma, sampling)
    if epsilon is not None:
        check_epsilon(epsilon)
    if steps is not None:
        check_steps(steps, 1)
    count = steps or 0
    try:
        if sigma is None:
            sigma = calibrate_noise_multiplier(
                epsilon, delta, count, sampling, accountant=accountant
            )
        elif steps is None:
            count = calibrate_steps(epsilon, delta, sigma, sampling, accountant=accountant)
        reached = epsilon_after(sigma, delta, count, sampling, accountant=accountant)
    except ValueError as error:
        return Row(name, adjacency, accountant, error=str(error))
    if reached == math.inf:
        return Row(name, adjacency, accountant, sigma, count, error="epsilon is infinite")
    return Row(name, adjacency, accountant, sigma, count, reached)


def _table(rows: list[Row], starred: str, options: argparse.Namespace) -> str:
    lines = [("sampling", "adjacency", "accountant", "noise multiplier", "steps", "epsilon")]
    numbers: dict[str, int] = {}
    for row in rows:
        star = " *" if row.sampling == starred else ""
        if row.error is not None:
            cells = (f"[{numbers.setdefault(row.error, len(numbers) + 1)}]", "", "")
        else:
            sigma, epsilon = row.noise_multiplier or 0.0, row.epsilon or 0.0
            given = options.noise_multiplier is not None
            shown = f"{sigma:g}" if given else _rounded_up(sigma)
            cells = (shown, str(row.steps), _rounded_up(epsilon))
        lines.append((row.sampling + star, row.adjacency, row.accountant, *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"delta = {options.delta:g}"]
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)]
        text.append("  ".join([*left, *right]).rstrip())
    return "\n".join([*text, *(f"[{number}] {reason}" for reason, number in numbers.items())])


def _rounded_up(value: float) -> str:
    """Return ``value`` with 4 decimals and not less than it is: less noise is not enough."""
    return f"{math.ceil(value * 1e4) / 1e4:.4f}"


def _check_plot(file: Path) -> None:
    """Make the folder of the plot; raise, before anything is computed, if there can be none."""
    if file.suffix not in PLOTS:
        raise ValueError(f"--plot must be a file that ends in {', '.join(PLOTS)}, got {file}")
    if file.is_dir():
        raise ValueError(f"--plot must be a file, got the folder {file}")
    require_matplotlib()
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK):
        raise PermissionError(f"--plot: nothing can be written to {file.parent}")


def _title(sampling: Sampling) -> str:
    if isinstance(sampling, Poisson):
        return f"Poisson sampling at rate {sampling.rate:.4g}"
    if isinstance(sampling, WithoutReplacement):
        return f"Batches of {sampling.batch / sampling.population:.4g} without replacement"
    return "Shuffled batches"


def _plot(starred: str, sampling: Sampling, rows: list[Row], options: argparse.Namespace) -> None:
    """Draw all accountants of the chosen sampling with the noise that its tightest asks for."""
    best = next(row for row in rows if row.sampling == starred)
    if best.noise_multiplier is None or best.steps is None:
        raise ValueError(f"there is nothing to plot: {best.error}")
    statement = gaussian_step(best.noise_multiplier, sampling, unreachable=UNREACHABLE)
    names = [name for name in ACCOUNTANTS if name in _accountants(sampling)]
    curve = epsilon_curve(statement, best.steps, options.delta, names)
    title = f"{_title(sampling)}, noise multiplier {_rounded_up(best.noise_multiplier)}"
    plot(curve, title, options.plot, options.epsilon)
