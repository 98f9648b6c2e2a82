"""A table of results for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpkernels.repro.record import trained_by
from dpkernels.repro.results import Ours, Progress, Result
from dpkernels.repro.tables import Block, Epsilon, Printed
from dpkernels.repro.timing import Timing

_COLUMNS = (
    "method",
    "epsilon",
    "paper",
    "ours",
    "difference",
    "seeds",
    "epsilon spent",
)
_FIXED_SEEDS = (
    "Seeds are fixed, so that runs can be repeated: the models are for comparison, not for release."
)
_CLOCKS = (
    "Each whole training was its command's only one, with all threads; medians over {repeats}. "
    "Wall-clock is of "
    "everything (data, calibration, first estimate of curvature, training, evaluation), samples/s "
    "of the steps and all estimates of curvature. How many times as fast as Opacus' "
    "DP-SGD it is stands beside. Others: the most processors that anything else on the machine "
    "kept busy meanwhile."
)
_NONE = "-"


def render(progress: Progress, where: Mapping[str, Any]) -> str:
    """Return Markdown: notes, a table for each data set, its timings, what was not run."""
    table, results = progress.table, progress.results()
    notes = [*table.notes, _FIXED_SEEDS]
    if progress.changed:
        changes = ", ".join(f"{name} = {value}" for name, value in progress.changed.items())
        notes.insert(0, f"Not the table's settings: {changes}.")
    parts = [
        f"# DP-KFC, {table.title}: {table.caption}",
        f"{table.measured.capitalize()} in percent, mean ± standard deviation over seeds; "
        "differences in points.",
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
    timed = {e: found for (title, e), found in progress.timings.items() if title == block.title}
    if not shown and not timed:
        return []
    about = [f"Settings: {_settings(progress.settings(block))}."]
    about += [f"Data: {note}." for note in progress.data(block)]
    parts = [f"## {block.title}", " ".join(about)]
    own = progress.own_settings(block)
    if own:
        parts.append("\n".join(f"- {label}: {_settings(its)}" for label, its in own.items()))
    if shown:
        parts.append(_grid(_COLUMNS, map(_row, shown)))
    for epsilon, timings in timed.items():
        parts += [f"### {block.title}: time, at epsilon {_epsilon(epsilon)}", *_clocks(timings)]
    return parts


def _row(result: Result) -> list[str]:
    cell, ours = result.cell, result.ours
    row = [cell.row.label, _epsilon(cell.epsilon), _printed(cell.printed)]
    if ours is None:
        return [*row, "not yet run", *[_NONE] * (len(_COLUMNS) - 4)]
    return [
        *row,
        _accuracy(ours),
        _NONE if result.difference is None else f"{result.difference:+.2f}",
        str(ours.seeds),
        "not private" if ours.epsilon is None else f"{ours.epsilon:.4f}",
    ]


def _clocks(timings: Sequence[Timing]) -> list[str]:
    """Return what the clock is of, and the table of times."""
    peers = [timing for timing in timings if timing.opacus is not None]
    columns = ["method", "wall-clock", "samples/s"]
    columns += [f"{what} vs. {peer.opacus}" for peer in peers for what in ("training", "whole run")]
    rows = []
    for timing in timings:
        ratios = [ratio for peer in peers for ratio in timing.against(peer)]
        rows.append(
            [
                timing.label,
                f"{timing.wall_seconds:.1f} s",
                f"{timing.samples_per_second:,.0f}",
                *(f"{ratio:.2f}x" for ratio in ratios),
                _NONE if timing.others is None else f"{timing.others:.2f}",
            ]
        )
    counts = sorted({len(timing.trials) for timing in timings})
    repeats = " or ".join(map(str, counts)) + (" run" if counts == [1] else " runs")
    return [_CLOCKS.format(repeats=repeats), _grid([*columns, "others"], rows)]


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
    lines = [f"`{progress.command}`, {where['time']}, on what these had trained:"]
    for one in trained_by(progress.attempts()):
        commit = one["commit"] + (" with changes" if one["dirty"] else "")
        # Records of earlier versions have the commit alone.
        rest = [one["cpu"], f"{one['cores']} cores"] if "cpu" in one else []
        rest += [f"{one['threads']} threads"] if "threads" in one else []
        rest += [f"{one['jobs']} at once"] if one["jobs"] is not None else []
        rest += [f"{name} {value}" for name, value in one.get("versions", {}).items() if value]
        lines.append(f"{commit}: {one['pieces']} pieces of trainings; {', '.join(rest) or _NONE}")
    return "\n".join(f"- {line}" for line in lines)


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _grid(columns: Sequence[str], rows: Any) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _epsilon(epsilon: Epsilon) -> str:
    return "none" if epsilon is None else f"{epsilon:g}"


def _printed(printed: Printed | None) -> str:
    if printed is None:
        return _NONE
    spread = "" if printed.spread is None else f" ± {printed.spread:.1f}"
    return f"{printed.mean:.1f}{spread}" + (f" ({printed.source})" if printed.source else "")


def _accuracy(ours: Ours) -> str:
    return f"{ours.mean:.2f}" + ("" if ours.spread is None else f" ± {ours.spread:.2f}")
