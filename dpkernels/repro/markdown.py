"""A table of results for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpkernels.repro.results import Ours, Progress, Result
from dpkernels.repro.tables import Block, Epsilon, Printed

_COLUMNS = (
    "method",
    "epsilon",
    "paper",
    "ours",
    "difference",
    "seeds",
    "epsilon spent",
    "wall-clock",
    "samples/s",
)
_FIXED_SEEDS = (
    "Seeds are fixed, so that runs can be repeated: the models are for comparison, not for release."
)
_CLOCKS = (
    "Wall-clock is of a whole run (data, calibration, first estimate of curvature, training, "
    "evaluation), samples/s of training alone with the estimates of curvature in it; both are "
    "medians over seeds."
)
_NONE = "-"


def render(progress: Progress, where: Mapping[str, Any]) -> str:
    """Return Markdown: notes, a table for each data set, Opacus beside ours, what was not run."""
    table, results = progress.table, progress.results()
    notes = [*table.notes, _FIXED_SEEDS, _CLOCKS]
    if progress.changed:
        changes = ", ".join(f"{name} = {value}" for name, value in progress.changed.items())
        notes.insert(0, f"Not the paper's settings: {changes}.")
    parts = [
        f"# DP-KFC, Table {table.number}: {table.caption}",
        "Test accuracy in percent, mean ± standard deviation over seeds; differences in points.",
        "\n".join(f"- {note}" for note in notes),
    ]
    for block in table.blocks:
        parts += _block(block, [r for r in results if r.cell.block is block], progress)
    reasons = _reasons(results)
    if reasons:
        parts += ["## Not run", "\n".join(reasons)]
    parts += ["## Made by", _made_by(progress, where)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, results: Sequence[Result], progress: Progress) -> list[str]:
    shown = [result for result in results if result.not_run is None]
    if not shown:
        return []
    settings = ", ".join(f"{name} {value}" for name, value in progress.settings(block).items())
    about = [f"Settings: {settings}.", *(f"Data: {note}." for note in progress.data(block))]
    parts = [f"## {block.title}", " ".join(about), _grid(_COLUMNS, map(_row, shown))]
    opacus = progress.opacus.get(block.title)
    if opacus:
        epsilon = progress.compared_at(block)
        parts += [
            f"Beside Opacus' DP-SGD at epsilon {_epsilon(epsilon)}, one run of each mode; "
            "how many times as fast:",
            _beside_opacus(
                [result for result in shown if result.cell.epsilon == epsilon],
                {mode: Ours.of([trial]) for mode, trial in opacus.items()},
            ),
        ]
    return parts


def _row(result: Result) -> list[str]:
    cell, ours = result.cell, result.ours
    row = [cell.row.label, _epsilon(cell.epsilon), _printed(cell.printed)]
    if ours is None:
        return [*row, "not yet run", *[_NONE] * 5]
    return [
        *row,
        _accuracy(ours),
        _NONE if result.difference is None else f"{result.difference:+.2f}",
        str(ours.seeds),
        "not private" if ours.epsilon is None else f"{ours.epsilon:.4f}",
        f"{ours.wall_seconds:.1f} s",
        f"{ours.samples_per_second:,.0f}",
    ]


def _beside_opacus(results: Sequence[Result], opacus: Mapping[str, Ours]) -> str:
    """Return speeds of both, and how many times Opacus' DP-SGD's they are.

    Of training, and of the whole run, which has the first estimate of curvature in it.
    """
    ours = [(result.cell.row.label, result.ours) for result in results if result.ours]
    theirs = [(f"Opacus' DP-SGD, {mode}", value) for mode, value in opacus.items()]
    rows = []
    for label, one in [*ours, *theirs]:
        ratios = [one.samples_per_second / o.samples_per_second for o in opacus.values()]
        ratios += [o.wall_seconds / one.wall_seconds for o in opacus.values()]
        clocks = [f"{one.wall_seconds:.1f} s", f"{one.samples_per_second:,.0f}"]
        rows.append([label, _accuracy(one), *clocks, *(f"{r:.2f}x" for r in ratios)])
    columns = ["method", "accuracy", "wall-clock", "samples/s"]
    columns += [f"{what} vs. {mode}" for what in ("training", "whole run") for mode in opacus]
    return _grid(columns, rows)


def _reasons(results: Sequence[Result]) -> list[str]:
    """Return a line for each row that is not run, its printed cells and the reason."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        if result.not_run is not None:
            cell = result.cell
            key = cell.block.title, cell.row.label, result.not_run
            printed = f"{_printed(cell.printed)} at epsilon {_epsilon(cell.epsilon)}"
            lines.setdefault(key, []).append(printed)
    return [
        f"- {title}, {label}: {reason} (paper: {'; '.join(printed)})"
        for (title, label, reason), printed in lines.items()
    ]


def _made_by(progress: Progress, where: Mapping[str, Any]) -> str:
    commits = ", ".join(progress.commits()) or _NONE
    versions = ", ".join(f"{name} {value}" for name, value in where["versions"].items() if value)
    return "\n".join(
        [
            f"- `dpkernels repro dp-kfc --table {progress.table.number} --seeds {progress.seeds}`, "
            f"{where['time']}",
            f"- commits of the trainings (+ with changes): {commits}",
            f"- {where['cpu']}, {where['cores']} cores, {where['threads']} threads; {versions}",
        ]
    )


def _grid(columns: Sequence[str], rows: Any) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _epsilon(epsilon: Epsilon) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _printed(printed: Printed | None) -> str:
    if printed is None:
        return _NONE
    return f"{printed.mean:.1f}" + ("" if printed.spread is None else f" ± {printed.spread:.1f}")


def _accuracy(ours: Ours) -> str:
    return f"{ours.mean:.2f}" + ("" if ours.spread is None else f" ± {ours.spread:.2f}")
