"""A table of merged models as Markdown, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro.federated.fedfisher.outcome import Outcome
from dpkernels.repro.federated.fedfisher.study import Result, Sheet
from dpkernels.repro.federated.report import origins
from dpkernels.whole_file import whole_file

_WHAT = (
    "Test accuracy in percent, mean and standard deviation over seeds (one seed: its figure); with "
    "three figures: paper / ours / difference. In brackets: mean and standard deviation over other "
    "partitions, one seed each."
)


def markdown(sheet: Sheet, results: Sequence[Result], where: Mapping[str, Any]) -> str:
    """Return a table for each panel, what merging cost, and who ran it."""
    lines = [f"# FedFisher: {sheet.caption}", "", *(f"- {note}" for note in sheet.notes)]
    lines += [f"- Left out: {reason}." for reason in _reasons(results)]
    lines += ["", _WHAT]
    for panel in dict.fromkeys(result.cell.panel for result in results):
        here = [result for result in results if result.cell.panel == panel]
        lines += ["", f"## {panel}", "", *_panel(here), "", *_costs(here)]
    lines += ["", "## Provenance", ""]
    lines += [f"Written at {where['commit']}, {where['cpu']}, {where['time']}."]
    lines += [f"- {text}" for text in origins([o for r in results for o in _all(r)])]
    return "\n".join(lines) + "\n"


def _all(result: Result) -> tuple[Outcome, ...]:
    return (*result.outcomes, *result.others)


def _reasons(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(f"{r.cell.row.label}: {r.reason}" for r in results if r.reason))


def _panel(results: Sequence[Result]) -> list[str]:
    columns = list(dict.fromkeys(result.cell.column for result in results))
    lines = ["| row | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label in dict.fromkeys(result.cell.row.label for result in results):
        row = {r.cell.column: r for r in results if r.cell.row.label == label}
        cells = [_figure(row[column]) if column in row else "-" for column in columns]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _figure(result: Result) -> str:
    paper = result.cell.paper
    if not result.outcomes:
        return "not run" if paper is None else f"{paper:.2f} / not run"
    mean = result.mean
    ours = f"{mean:.2f} ± {result.spread:.2f}" if len(result.outcomes) > 1 else f"{mean:.2f}"
    text = ours if paper is None else f"{paper:.2f} / **{ours}** / {mean - paper:+.2f}"
    spread = result.over_partitions()
    return text if spread is None else f"{text} ({spread[0]:.1f} ± {spread[1]:.1f})"


def _costs(results: Sequence[Result]) -> list[str]:
    """Return what a row's upload and its server took, over the panel."""
    lines = ["| row | upload, of FedAvg's bytes | server iterations | chosen | server, s |"]
    lines += ["|---|---|---|---|---|"]
    seen: dict[str, list[Outcome]] = {}
    for result in results:
        row = result.cell.row
        told = row.label if row.merging.form == "none" else f"{row.label} ({row.merging.form})"
        seen.setdefault(told, []).extend(_all(result))
    for told, outcomes in seen.items():
        if outcomes:
            share = max(one.bytes_up / one.fedavg_bytes for one in outcomes)
            iterations = max(one.iterations for one in outcomes)
            chosen = _chosen([one.chosen for one in outcomes])
            seconds = statistics.median(one.server_seconds for one in outcomes)
            lines.append(f"| {told} | {share:.3f} | {iterations} | {chosen} | {seconds:.2f} |")
    lines += ["", "Chosen: median over runs. Seconds are of the machine as it was."]
    alone = [one.clients_alone for outcomes in seen.values() for one in outcomes]
    if alone:
        lines += [f"The clients' own models: {statistics.fmean(alone):.1f}% on average."]
    return lines


def _chosen(found: Sequence[int | str]) -> str:
    numbers = [one for one in found if isinstance(one, int)]
    if len(numbers) == len(found):
        return f"{statistics.median(numbers):g}"
    return ", ".join(sorted({str(one) for one in found}))


def to_dict(
    sheet: Sheet, results: Sequence[Result], where: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """Return everything, in types that JSON knows."""
    return {
        "title": f"FedFisher: {sheet.caption}",
        "notes": list(sheet.notes),
        "command": command,
        "provenance": dict(where),
        "cells": [_cell(result) for result in results],
    }


def _cell(result: Result) -> dict[str, Any]:
    cell = result.cell
    there = bool(result.outcomes)
    return {
        "panel": cell.panel,
        "column": cell.column,
        "row": cell.row.label,
        "merging": dataclasses.asdict(cell.row.merging),
        "paper": cell.paper,
        "mean": result.mean if there else None,
        "spread": result.spread if there else None,
        "seeds": [_seed(one) for one in result.outcomes],
        "partitions": [_seed(one) for one in result.others],
        "left_out": result.reason,
    }


def _seed(outcome: Outcome) -> dict[str, Any]:
    kept = dataclasses.asdict(outcome)
    del kept["origin"]
    return kept


def draw(sheet: Sheet, results: Sequence[Result], file: Path) -> None:
    """Draw curves over the columns if these are numbers, else dots: crosses are the paper's."""
    panels = list(dict.fromkeys((r.cell.panel, _split(sheet, r)) for r in results))
    labels = list(dict.fromkeys(r.cell.row.label for r in results))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    high = 3.6 if sheet.curves else 0.8 + 0.3 * len(labels)
    figure = require_matplotlib()(figsize=(4.6 * columns, high * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (panel, split) in zip(axes, panels, strict=False):
        here = [r for r in results if (r.cell.panel, _split(sheet, r)) == (panel, split)]
        if sheet.curves:
            _curves(axis, here, labels, sheet.curves)
        else:
            _dots(axis, here, labels)
        axis.set_title(f"{panel}{split}", fontsize="small")
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if sheet.curves:
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="x-small")
    told = "" if sheet.curves else "\ncrosses: the paper's; thin bars: other partitions"
    figure.suptitle(f"FedFisher: {sheet.caption}{told}", fontsize="medium")
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=110, format="png")


def _split(sheet: Sheet, result: Result) -> str:
    return "" if sheet.curves else f", {result.cell.column}"


def _curves(axis: Any, results: Sequence[Result], labels: Sequence[str], what: str) -> None:
    for label in labels:
        row = [r for r in results if r.cell.row.label == label and r.outcomes]
        n = labels.index(label)
        style = {"color": f"C{n % 10}", "ls": "-" if n < 10 else "--"}
        at, means = [int(r.cell.column) for r in row], [r.mean for r in row]
        axis.errorbar(at, means, [r.spread for r in row], label=label, capsize=2, lw=1.2, **style)
    axis.set(xlabel=what, ylabel="accuracy, %")
    axis.set_xticks(sorted({int(r.cell.column) for r in results}))


def _dots(axis: Any, results: Sequence[Result], labels: Sequence[str]) -> None:
    for r in results:
        y = -labels.index(r.cell.row.label)
        if r.cell.paper is not None:
            axis.plot([r.cell.paper], [y], "x", color="black", ms=6)
        if not r.outcomes:
            continue
        axis.errorbar([r.mean], [y], xerr=[r.spread], fmt="o", color="C0", ms=4, capsize=3)
        spread = r.over_partitions()
        if spread is not None:
            axis.errorbar([spread[0]], [y - 0.25], xerr=[spread[1]], fmt="|", color="C1", lw=0.8)
    axis.set_yticks([-n for n in range(len(labels))], labels, fontsize="x-small")
    axis.set_xlabel("accuracy, %")
