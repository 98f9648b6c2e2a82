"""Accuracy over rounds, with the epsilon spent beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpkernels.federated.options import Options
from dpkernels.federated.outputs import Evaluated
from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.whole_file import whole_file

_ACCURACY, _EPSILON = "#1f6fb4", "#c05a1c"


def draw(rows: Sequence[Evaluated], options: Options, file: Path) -> None:
    """Draw ``rows`` into ``file``; without a guarantee there is no second axis, and the title says.

    Raises RuntimeError without matplotlib, which the ``plots`` extra has.
    """
    figure = require_matplotlib()(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    rounds = [row.round for row in rows]
    accuracies = [100 * row.accuracy for row in rows]
    axes.plot(rounds, accuracies, "-o", color=_ACCURACY, lw=1.8, ms=3.5)
    private = " (not private)" if options.accuracy_is_private else ""
    axes.set_ylabel(f"accuracy{options.measured}{private}, %", color=_ACCURACY)
    axes.set_xlabel("rounds")
    axes.set_xlim(0, 1.02 * max(rounds))
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    title = f"{options.algorithm} on {options.dataset}, {options.clients} clients"
    spent = [row.epsilon for row in rows if row.epsilon is not None]
    if len(spent) == len(rows):
        beside = axes.twinx()
        beside.plot(rounds, spent, "--", color=_EPSILON, lw=1.5)
        beside.set_ylabel(f"epsilon spent at delta = {options.delta:g}", color=_EPSILON)
        beside.set_ylim(0, 1.08 * max(spent))
        beside.spines["top"].set_visible(False)
        title += f": {accuracies[-1]:.1f}% at epsilon {spent[-1]:.3g}"
    else:
        axes.spines["right"].set_visible(False)
        title += f": {accuracies[-1]:.1f}%, no epsilon: not private"
    axes.set_title(title, fontsize=11, loc="left", pad=10)
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=150, format=file.suffix[1:])
