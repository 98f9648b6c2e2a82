"""Accuracy over epsilon, the paper's dashed and ours solid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkernels.repro.results import Progress, Result


def draw(progress: Progress, file: Path) -> None:
    """Draw a panel for each data set that is run, error bars of one standard deviation.

    Raises RuntimeError without matplotlib, which the ``plots`` extra has.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError(
            "a plot needs matplotlib; install it with: pip install 'dpkernels[plots]'"
        ) from None
    results = [r for r in progress.results() if r.not_run is None and r.cell.epsilon is not None]
    titles = list(dict.fromkeys(result.cell.block.title for result in results))
    figure = Figure(figsize=(6.4 * max(1, len(titles)), 4.8), layout="constrained")
    panels = figure.subplots(1, max(1, len(titles)), squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=False):
        _panel(axes, [result for result in results if result.cell.block.title == title])
        axes.set(title=title, xlabel="epsilon", ylabel="test accuracy, %")
        axes.legend(fontsize="x-small")
    figure.suptitle(f"DP-KFC, {progress.table.title}: paper dashed, ours solid")
    figure.savefig(file, dpi=150)


def _panel(axes: Any, results: Sequence[Result]) -> None:
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


def _columns(rows: Sequence[tuple[Any, ...]], count: int = 2) -> list[list[Any]]:
    return [[row[n] for row in rows] for n in range(count)]
