"""Accuracy over epsilon, or over methods where there is one epsilon; paper's and ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro.results import Progress, Result


def draw(progress: Progress, file: Path) -> None:
    """Draw a panel for each data set that is run, error bars of one standard deviation.

    Raises RuntimeError without matplotlib, which the ``plots`` extra has.
    """
    results = [r for r in progress.results() if r.not_run is None and r.cell.epsilon is not None]
    titles = list(dict.fromkeys(result.cell.block.title for result in results))
    figure = require_matplotlib()(figsize=(6.4 * max(1, len(titles)), 4.8), layout="constrained")
    panels = figure.subplots(1, max(1, len(titles)), squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=False):
        shown = [result for result in results if result.cell.block.title == title]
        axes.set(title=title, ylabel=f"{progress.table.measured}, %")
        if len({result.cell.epsilon for result in shown}) == 1:
            _over_methods(axes, shown)
        else:
            _over_epsilon(axes, shown)
    figure.suptitle(f"DP-KFC, {progress.table.title}: paper crosses, ours dots")
    figure.savefig(file, dpi=150)


def _over_epsilon(axes: Any, results: Sequence[Result]) -> None:
    labels = list(dict.fromkeys(result.cell.row.label for result in results))
    for n, label in enumerate(labels):
        row = sorted(
            (r for r in results if r.cell.row.label == label), key=lambda r: r.cell.epsilon or 0.0
        )
        colour = f"C{n}"
        printed = [(r.cell.epsilon, r.cell.printed.mean) for r in row if r.cell.printed]
        axes.plot(*_columns(printed), "--x", color=colour, lw=1, alpha=0.7)
        ours = [(r.cell.epsilon, r.ours.mean, r.ours.spread or 0.0) for r in row if r.ours]
        x, mean, spread = _columns(ours, 3)
        axes.errorbar(x, mean, spread, fmt="-o", color=colour, ms=4, capsize=3, label=label)
    ticks = sorted({result.cell.epsilon for result in results if result.cell.epsilon is not None})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("epsilon")
    axes.legend(fontsize="x-small")


def _over_methods(axes: Any, results: Sequence[Result]) -> None:
    """Draw methods side by side: over their only epsilon they would hide each other."""
    for n, result in enumerate(results):
        printed, ours = result.cell.printed, result.ours
        if printed is not None:
            axes.errorbar(n - 0.1, printed.mean, printed.spread, fmt="x", color="grey", capsize=3)
        if ours is not None:
            axes.errorbar(n + 0.1, ours.mean, ours.spread, fmt="o", color=f"C{n}", capsize=3)
    labels = [result.cell.row.label for result in results]
    axes.set_xticks(range(len(results)), labels, rotation=20, ha="right")
    axes.set_xlabel(f"epsilon = {results[0].cell.epsilon:g}")


def _columns(rows: Sequence[tuple[Any, ...]], count: int = 2) -> list[list[Any]]:
    return [[row[n] for row in rows] for n in range(count)]
