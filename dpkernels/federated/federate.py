"""A federated run from options to report, top to bottom."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dpkernels.federated.build import Built, build
from dpkernels.federated.curve import draw
from dpkernels.federated.loop import Federation, Round
from dpkernels.federated.options import Options
from dpkernels.federated.outputs import (
    CHECKPOINT,
    CURVE,
    JOURNAL,
    Evaluated,
    Outcome,
    write_metrics,
    write_model,
)
from dpkernels.run.checkpoint import read, write_atomically
from dpkernels.train import kept_options
from dpkernels.train.interrupts import Interrupts

# So many rounds one after the other that too few answer to: the next ones will not be better.
_MOST_LOST = 100


def federate(
    options: Options, output: Path, *, resume: bool = False, progress: bool = True
) -> Outcome:
    """Train as ``options`` say, within their budget; write everything to ``output``.

    Unit, adjacency, view, sensitivity, noise and sampling: those of ``options``, as ``Federation``
    has them, and as the report states them.

    resume: go on from the checkpoint in ``output``. Rounds after it that a killed run had opened
    are counted, and given up from the end of the plan: epsilon stays what it was to be. (A fixed
    seed repeats them, noise and all.)

    Raises KeyboardInterrupt, with a checkpoint of the last round written, if Ctrl-C was pressed.
    Errors before the first round leave neither checkpoint nor options. Raises ValueError for
    options that do not fit the data, RuntimeError if too few clients answer.
    """
    checkpoint = output / CHECKPOINT
    if resume and not checkpoint.exists():
        raise FileNotFoundError(
            f"output: {checkpoint} is not there: the run was stopped before its first round; leave "
            "--resume out to begin"
        )
    if not resume:
        (output / JOURNAL).unlink(missing_ok=True)
    built = build(options, output / JOURNAL)
    if built.federation.void is not None:
        print(f"NO GUARANTEE: {built.federation.void}", file=sys.stderr)
    elif options.budget is None:
        print("NO GUARANTEE: --epsilon none adds no noise", file=sys.stderr)
    rows: list[Evaluated] = []
    if resume:
        state = read(checkpoint)
        built.federation.load_state_dict(state["federation"])
        rows = [Evaluated(**row) for row in state["rows"]]
        return _federate(built, rows, output, progress)
    try:
        kept_options.write(built.options, output)
        _save(built, rows, output)
        return _federate(built, rows, output, progress)
    except Exception:
        if built.federation.rounds_begun == 0:
            # Nothing was released: the folder must not seem to hold a run.
            for name in (CHECKPOINT, JOURNAL, kept_options.FILE):
                (output / name).unlink(missing_ok=True)
        raise


def _save(built: Built, rows: list[Evaluated], output: Path) -> None:
    state = {"federation": built.federation.state_dict(), "rows": [row.to_dict() for row in rows]}
    write_atomically(output / CHECKPOINT, state)


def _federate(built: Built, rows: list[Evaluated], output: Path, progress: bool) -> Outcome:
    """Run what is left of the rounds, and write what comes of them."""
    federation, options = built.federation, built.options
    released, lost = federation.rounds_released, 0
    bar = tqdm(
        total=federation.rounds_planned, initial=released, unit="round", disable=not progress
    )
    with bar, Interrupts() as interrupts:
        shown = time.perf_counter()
        while not federation.finished:
            done = federation.round()
            lost = 0 if done.released else lost + 1
            if lost == _MOST_LOST:
                _save(built, rows, output)
                raise RuntimeError(_too_few(federation, done))
            at = federation.rounds_released
            evaluated = done.released and (at % options.evaluate_every == 0 or federation.finished)
            if evaluated:
                rows.append(_evaluated(federation, done))
            if evaluated or federation.rounds_begun % options.checkpoint_every == 0:
                _save(built, rows, output)
            if evaluated:
                write_metrics(output, options, rows)
            now = time.perf_counter()
            if not bar.disable and (now - shown >= bar.mininterval or federation.finished):
                shown = now
                bar.set_postfix(_figures(built, rows, done), refresh=False)
            bar.update(int(done.released))
            if interrupts.asked and not federation.finished:
                _save(built, rows, output)
                raise KeyboardInterrupt
    write_model(output, built)
    outcome = Outcome(built, tuple(rows))
    try:
        draw(rows, options, output / CURVE)
    except RuntimeError as error:
        print(f"{CURVE} is not drawn: {error}", file=sys.stderr)
    outcome.write(output)
    return outcome


def _evaluated(federation: Federation, done: Round) -> Evaluated:
    return Evaluated(
        federation.rounds_released,
        done.stage,
        federation.accuracy(),
        federation.epsilon(),
        done.clients,
        done.arrived,
        federation.bytes_up,
        federation.bytes_down,
        federation.seconds,
    )


def _figures(built: Built, rows: list[Evaluated], done: Round) -> dict[str, Any]:
    """Return what the bar shows beside the round."""
    federation, budget = built.federation, built.options.budget
    spent = federation.epsilon(within=0.02)
    if spent is not None and budget is not None:
        # Noise is calibrated for all rounds: what such a value has beyond the budget is not spent.
        spent = min(spent, budget)
    return {
        "accuracy (not private)" if built.options.accuracy_is_private else "accuracy": (
            f"{rows[-1].accuracy:.1%}" if rows else "-"
        ),
        "epsilon": "none" if spent is None else f"{spent:.3f}",
        "clients (not private)"
        if built.options.participation_is_secret
        else "clients": f"{done.arrived} of {done.clients}",
        "MB up": f"{federation.bytes_up / 1e6:.1f}",
        "down": f"{federation.bytes_down / 1e6:.1f}",
    }


def _too_few(federation: Federation, done: Round) -> str:
    required = federation.release.required
    return (
        f"max_dropouts: {required} clients must answer for a round to be released, and in "
        f"{_MOST_LOST} rounds fewer did ({done.arrived} in the last); begin again with a larger "
        "--max-dropouts, which adds noise"
    )
