"""What the attacks found, before and after, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.adversary.attack import Outcome
from benchmarks.report import markdown_table

# Of a refusal's reason in a table; the whole of it is in the JSON file.
_REASON = 100


def as_json(where: Mapping[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return one run of the attacks; a figure that is not finite becomes a string."""
    rows = [asdict(one) for one in outcomes]
    for row in rows:
        if row["figure"] is not None and abs(row["figure"]) == float("inf"):
            row["figure"] = str(row["figure"])
    return {"where": dict(where), "outcomes": rows}


def from_json(run: Mapping[str, Any]) -> list[Outcome]:
    """Return the outcomes of a run."""
    rows = [dict(row) for row in run["outcomes"]]
    for row in rows:
        if row["figure"] is not None:
            row["figure"] = float(row["figure"])
    return [Outcome(**row) for row in rows]


def read(path: Path) -> dict[str, Any]:
    """Return the runs that a file holds, by ``before`` and ``after``; none if there is no file."""
    if not path.exists():
        return {}
    runs: dict[str, Any] = json.loads(path.read_text())
    return runs


def table(runs: Mapping[str, Any]) -> str:
    """Return a row for each attack, with a column for each run."""
    columns = {label: {one.name: one for one in from_json(run)} for label, run in runs.items()}
    attacks = {name: one for column in columns.values() for name, one in column.items()}
    rows = [
        [str(one.item), name, *(_cell(column.get(name)) for column in columns.values())]
        for name, one in sorted(attacks.items(), key=lambda pair: pair[1].item)
    ]
    return markdown_table(["item", "attack", *columns], rows)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    text = str(outcome)
    short = text if len(text) <= _REASON else text[:_REASON].rsplit(" ", 1)[0] + " ..."
    return short if outcome.held else f"**{short}**"


def markdown(runs: Mapping[str, Any]) -> str:
    """Return the whole page: what was run where, and the table."""
    lines = ["# Attacks, and what they moved", ""]
    for label, run in runs.items():
        where, outcomes = run["where"], from_json(run)
        dirty = " with uncommitted changes" if where["dirty"] else ""
        lines.append(
            f"- {label}: {sum(one.held for one in outcomes)} of {len(outcomes)} claims held at "
            f"commit {where['commit'][:9]}{dirty}, {where['time'][:16]}; {where['cpu']}, "
            f"{where['instruction_set']['dpkernels']}, torch {where['versions']['torch']}"
        )
    lines += [
        "",
        "C is the clip bound. A figure in C is how far the released sum moves, without noise, when",
        "one record goes: the largest over the records. Bold: the claim did not hold. Reproduce",
        "with `python -m benchmarks.adversary`.",
        "",
        table(runs),
    ]
    return "\n".join(lines) + "\n"
