"""A federated table as Markdown, as JSON and as curves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro.federated.runs import Place
from dpkernels.repro.federated.study import Result
from dpkernels.whole_file import whole_file

_SEEDS = (
    "Seeds are fixed, so that runs can be repeated: the models are for comparison, not for "
    "release. They differ in noise, in the clients that are drawn and in the first parameters of a "
    "network; the partition is one. How many settings each row was chosen from stands below, and "
    "differs between rows."
)


def _place(result: Result) -> Place:
    """Return the place whose table or panel the result is in."""
    return result.cell.beside or result.cell.place


def _where(place: Place) -> str:
    seen = "each upload is seen" if place.view == "each_upload" else "secure aggregation"
    parts = [f"{place.dataset}, {place.clients} clients, {place.partition}", seen]
    if place.model != "logistic":
        parts = [f"{place.model} on {parts[0]}", f"{place.sampling} in a round", seen]
    return ", ".join([*parts, f"{place.unit} level, {place.adjacency}"])


def _figure(result: Result) -> str:
    paper, mean = result.cell.paper, result.mean
    ours = f"{mean:.2f} ± {result.spread:.2f}"
    if paper is None:
        return ours
    return f"{paper:.1f} / **{ours}** / {mean - paper:+.2f}"


def _held_out(result: Result) -> str:
    accuracy = result.chosen.accuracy
    return "-" if accuracy is None else f"{accuracy:.2f}"


def _settings(result: Result) -> str:
    chosen = result.chosen
    words = [f"{name} {value}" for name, value in chosen.algorithm]
    words += [f"centre {name} {value}" for name, value in chosen.centre or ()]
    return f"{chosen.rounds} rounds; {', '.join(words)}"


def markdown(
    title: str, notes: Sequence[str], results: Sequence[Result], where: Mapping[str, Any]
) -> str:
    """Return a table for each place, with what was chosen, what is void, and who ran it."""
    lines = [f"# {title}", ""]
    lines += [f"- {note}" for note in (*notes, _SEEDS)]
    lines += ["", "Test accuracy in percent, mean and standard deviation over seeds. Cells with"]
    lines += ["three figures: paper / ours / difference."]
    for place in dict.fromkeys(_place(result) for result in results):
        lines += ["", f"## {_where(place)}", ""]
        lines += _of_place([r for r in results if _place(r) == place])
    lines += ["", "## Settings", ""]
    lines += [
        "| place | row | budget | settings | held-out accuracy | of |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        of = str(r.chosen.searched) if r.chosen.searched else "not chosen"
        cell, place = r.cell, r.cell.place
        where_to = f"{place.model}, {place.dataset}, {place.partition}, {place.view}"
        lines.append(
            f"| {where_to} | {cell.row.label} | {cell.budget} | {_settings(r)} | {_held_out(r)} | "
            f"{of} |"
        )
    lines += [
        "",
        "## Provenance",
        "",
        f"Written at {where['commit']}, {where['cpu']}, {where['time']}.",
    ]
    lines += [f"- {text}" for text in origins(o for r in results for o in r.outcomes)]
    return "\n".join(lines) + "\n"


def _of_place(results: Sequence[Result]) -> list[str]:
    head = list(dict.fromkeys(r.cell.budget for r in results))
    lines = ["| row | " + " | ".join(head) + " | guarantee |", "|---" * (len(head) + 2) + "|"]
    for label in dict.fromkeys(r.cell.row.label for r in results):
        row = {r.cell.budget: r for r in results if r.cell.row.label == label}
        cells = [_figure(row[budget]) if budget in row else "-" for budget in head]
        first = next(iter(row.values())).outcomes[0]
        lines.append(f"| {label} | {' | '.join(cells)} | {_guarantee(first.void)} |")
    return lines


def _guarantee(void: str | None) -> str:
    return "sound" if void is None else "**none**: " + void.split(":")[0]


class Performed(Protocol):
    """What came of a run, with the commit and the processor that ran it."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """Of ``provenance.commit``, and cpu."""
        ...


def origins(outcomes: Iterable[Performed]) -> list[str]:
    """Return which commits and processors ran how many of the runs that are shown."""
    found = Counter(
        (o.origin.get("commit"), o.origin.get("dirty"), o.origin.get("cpu")) for o in outcomes
    )
    return [
        f"{count} runs by {commit}{' with changes' if dirty else ''} on {cpu}"
        for (commit, dirty, cpu), count in found.items()
    ]


def rounds_table(
    results: Sequence[Result], paper: Mapping[str, Mapping[float | None, tuple[float, ...]]]
) -> str:
    """Return accuracy at every tenth round, paper's beside ours, as Markdown."""
    steps = range(10, 71, 10)
    lines = ["", "## At every tenth round", ""]
    lines += ["| budget | row | " + " | ".join(map(str, steps)) + " |", "|---" * 9 + "|"]
    for result in results:
        cell, curve = result.cell, result.curve()
        printed = paper.get(cell.row.label, {}).get(cell.epsilon)
        if printed is not None:
            figures = " | ".join(f"{value:.2f}" for value in printed)
            lines.append(f"| {cell.budget} | {cell.row.label}, paper | {figures} |")
        figures = " | ".join(f"{curve[r]:.2f}" if r in curve else "" for r in steps)
        lines.append(f"| {cell.budget} | {cell.row.label}, ours | {figures} |")
    return "\n".join(lines) + "\n"


def to_dict(
    title: str,
    notes: Sequence[str],
    results: Sequence[Result],
    where: Mapping[str, Any],
    command: str,
) -> dict[str, Any]:
    """Return everything, in types that JSON knows."""
    return {
        "title": title,
        "notes": [*notes, _SEEDS],
        "command": command,
        "provenance": dict(where),
        "cells": [_cell(result) for result in results],
    }


def _cell(result: Result) -> dict[str, Any]:
    first = result.outcomes[0]
    return {
        "place": dataclasses.asdict(result.cell.place),
        "row": result.cell.row.label,
        "epsilon": result.cell.epsilon,
        "sigma": result.cell.sigma,
        "paper": result.cell.paper,
        "mean": result.mean,
        "spread": result.spread,
        "seeds": [outcome.final for outcome in result.outcomes],
        "curve": result.curve(),
        "epsilon_spent": first.epsilon,
        "claimed": first.claimed,
        "void": first.void,
        "bytes_up": first.bytes_up,
        "bytes_down": first.bytes_down,
        "chosen": dataclasses.asdict(result.chosen),
    }


def draw(title: str, results: Sequence[Result], file: Path) -> None:
    """Draw accuracy over rounds, a panel for each place and epsilon, dots for the paper's end."""
    panels = list(dict.fromkeys((_place(r), r.cell.budget) for r in results))
    labels = list(dict.fromkeys(r.cell.row.label for r in results))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = require_matplotlib()(figsize=(4.6 * columns, 3.4 * rows + 1.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (place, budget) in zip(axes, panels, strict=False):
        for r in results:
            if (_place(r), r.cell.budget) != (place, budget):
                continue
            n = labels.index(r.cell.row.label)
            style = {"color": f"C{n % 10}", "ls": "-" if n < 10 else "--"}
            curve = r.curve()
            panel.plot(list(curve), list(curve.values()), label=r.cell.row.label, lw=1.3, **style)
            if r.cell.paper is not None:
                panel.plot([1.03 * max(curve)], [r.cell.paper], "x", color=style["color"], ms=5)
        seen = " (uploads seen)" if place.view == "each_upload" else ""
        told = [place.dataset, f"{place.clients} clients{seen}"]
        # What all panels have in common goes without saying.
        told += [
            str(getattr(place, name))
            for name in ("model", "partition", "unit", "sampling")
            if len({getattr(other, name) for other, _ in panels}) > 1
        ]
        panel.set_title(", ".join([*told, str(budget)]), fontsize="small")
        panel.set(xlabel="round", ylabel="accuracy, %")
        panel.grid(alpha=0.3)
        here = [r for r in results if (_place(r), r.cell.budget) == (place, budget)]
        shown = [value for r in here for value in (*r.curve().values(), r.cell.paper or r.mean)]
        # Rows that failed would flatten the others.
        top = max(r.mean for r in here)
        highest = max([top, *(r.cell.paper for r in here if r.cell.paper is not None)])
        panel.set_ylim(max(min(shown), top - 25) - 1, highest + 1)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    lines = {line.get_label(): line for panel in axes for line in panel.get_lines()}
    shown = [lines[label] for label in labels if label in lines]
    figure.legend(shown, labels, loc="outside lower center", ncols=3, fontsize="x-small")
    figure.suptitle(f"{title}: crosses are the paper's last round", fontsize="medium")
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=110, format="png")
