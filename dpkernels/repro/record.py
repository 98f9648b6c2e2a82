"""A table of results for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpkernels.repro.attempts import Attempt
from dpkernels.repro.results import Progress, Result
from dpkernels.repro.timing import Timing


def to_dict(progress: Progress, where: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything, in types that JSON knows; accuracies are in percent."""
    table = progress.table
    run = [block for block in table.blocks if block.not_run is None]
    return {
        "paper": "DP-KFC",
        "table": table.name,
        "caption": table.caption,
        "measured": table.measured,
        "notes": list(table.notes),
        "command": progress.command,
        "changed_settings": dict(progress.changed),
        "provenance": dict(where),
        "trained_by": trained_by(progress.attempts()),
        "settings": {block.title: progress.settings(block) for block in run},
        "own_settings": {block.title: progress.own_settings(block) for block in run},
        "data": {block.title: progress.data(block) for block in run},
        "cells": [_cell(result) for result in progress.results()],
        "timing": [
            {"block": title, "epsilon": epsilon, **_timing(timing, timings)}
            for (title, epsilon), timings in progress.timings.items()
            for timing in timings
        ],
    }


def trained_by(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return each machine and commit that trained, once, with how often."""
    found: list[dict[str, Any]] = []
    for attempt in attempts:
        origin = {name: value for name, value in attempt.origin.items() if name != "time"}
        origin["jobs"] = attempt.jobs
        same = next((o for o in found if {**o, "pieces": 0} == {**origin, "pieces": 0}), None)
        if same is None:
            found.append({**origin, "pieces": 1})
        else:
            same["pieces"] += 1
    return found


def _cell(result: Result) -> dict[str, Any]:
    cell, ours, printed = result.cell, result.ours, result.cell.printed
    return {
        "block": cell.block.title,
        "row": cell.row.label,
        "method": cell.row.method,
        "epsilon": cell.epsilon,
        "paper": None if printed is None else dict(vars(printed)),
        "ours": None if ours is None else {**vars(ours), "seeds": ours.seeds},
        "difference": result.difference,
        "not_run": result.not_run,
    }


def _timing(timing: Timing, beside: Sequence[Timing]) -> dict[str, Any]:
    ratios = {
        peer.opacus: dict(zip(("training", "whole_run"), timing.against(peer), strict=True))
        for peer in beside
        if peer.opacus is not None
    }
    return {
        "row": timing.label,
        "repeats": len(timing.trials),
        "samples_per_second": timing.samples_per_second,
        "wall_seconds": timing.wall_seconds,
        "times_opacus": ratios,
        "others_cores": timing.others,
        "accuracies": [trial.accuracy for trial in timing.trials],
        "epsilon_spent": timing.trials[0].epsilon,
    }
