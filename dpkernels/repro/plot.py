"""Accuracy over epsilon, or over methods where there is one epsilon; paper's and ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro.results import Progress, Result
from dpkernels.whole_file import whole_file


def draw(progress: Progress, file: Path) -> None:
    """Draw a panel for each data set that is run, error bars of one standard deviation.

    Raises RuntimeError without matplotlib, which the ``plots`` extra has.
    """
    results = [r for r in progress.results() if r.not_run is None and r.cell.epsilon is not None]
    titles = list(dict.fromkeys(result.cell.block.title for result in results))
    panels = [[r for r in results if r.cell.block.title == title] for title in titles]
    one_epsilon = all(len({r.cell.epsilon for r in shown}) == 1 for shown in panels)
    figure = _figure(panels, one_epsilon)
    for axes, title, shown in zip(figure.axes, titles, panels, strict=False):
        axes.set(title=title)
        (_over_methods if one_epsilon else _over_epsilon)(axes, shown, progress.table.measured)
    marks = ": paper crosses, ours dots" if any(r.cell.printed for r in results) else ""
    figure.suptitle(f"DP-KFC, {progress.table.title}{marks}")
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=150, format=file.suffix[1:])


def _figure(panels: Sequence[Sequence[Result]], one_epsilon: bool) -> Any:
    """Return a figure with axes for every panel: one above the other, or side by side."""
    new = require_matplotlib()
    count = max(1, len(panels))
    if not one_epsilon:
        figure = new(figsize=(6.4 * count, 5.6), layout="constrained")
        figure.subplots(1, count)
        return figure
    heights = [max(1, len(shown)) for shown in panels] or [1]
    size = (9.0, 1.0 + sum(0.9 + 0.26 * height for height in heights))
    figure = new(figsize=size, layout="constrained")
    figure.subplots(count, 1, height_ratios=[3 + height for height in heights])
    return figure


def _over_epsilon(axes: Any, results: Sequence[Result], measured: str) -> None:
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
    axes.set(xlabel="epsilon", ylabel=f"{measured}, %")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def _over_methods(axes: Any, results: Sequence[Result], measured: str) -> None:
    """Draw a line for each method: over their only epsilon they would hide each other."""
    for n, result in enumerate(results):
        printed, ours = result.cell.printed, result.ours
        if printed is not None:
            axes.errorbar(printed.mean, n, xerr=printed.spread, fmt="x", color="grey", capsize=3)
        if ours is not None:
            axes.errorbar(ours.mean, n, xerr=ours.spread, fmt="o", ms=5, color="C0", capsize=3)
    axes.set_yticks(range(len(results)), [result.cell.row.label for result in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel(f"{measured}, %, at epsilon {results[0].cell.epsilon:g}")


def _columns(rows: Sequence[tuple[Any, ...]], count: int = 2) -> list[list[Any]]:
    return [[row[n] for row in rows] for n in range(count)]
