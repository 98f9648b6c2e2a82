"""FedFisher's Figure 1: does the one-shot error fall with width, and is it U-shaped in local steps?

Theorem 1 bounds L(W*) by a term that falls with local steps K and one that rises with K and falls
with width m. Measured are the settings of Appendix D, where the two clients label the same inputs
differently, and a control where they agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro import provenance
from dpkernels.repro.federated.fedfisher_sweeps import (
    SERVER_RATE,
    SERVER_STEPS,
    Cell,
    Scale,
    Sweep,
    Swept,
    run,
    sweeps,
)
from dpkernels.repro.federated.fedfisher_two_layer import draw, least_eigenvalue
from dpkernels.whole_file import whole_file, write_text

NAME = "fedfisher_theorem"
TITLE = "FedFisher, Figure 1: a synthetic check of Theorem 1"
_LINES = {
    "local": "clients at home",
    "fedavg": "FedAvg (mean)",
    **{f"after_{steps}": f"FedFisher, T = {steps:.0e}".replace("+0", "") for steps in SERVER_STEPS},
    "limit": "FedFisher, T to infinity (W*)",
    "linear": "linearised at W*",
    "joint": "one model, all records",
}
_DISTANCES = {
    "moved": "client from W_0",
    "apart": "client from client",
    f"after_{SERVER_STEPS[1]}_away": "server (T = 1e5) from client",
    "limit_away": "server (W*) from client",
}
_COLOURS = {name: f"C{n}" for n, name in enumerate(_LINES)}


def conduct(
    output: Path,
    scale: Scale | None = None,
    *,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Run all, and write ``fedfisher_theorem`` as JSON, Markdown and a picture.

    Every sweep is written when it is done, and one that the JSON file has at the same settings is
    not run again; delete the file to start anew. About two minutes of one core.

    scale: how much is run, by default what was published.
    tell: gets a line as each sweep ends.

    Raises RuntimeError without matplotlib, which the ``plots`` extra has.
    """
    scale = scale or Scale()
    require_matplotlib()
    # Before anything runs: who edits the sources meanwhile does not change what ran.
    where = provenance.collect()
    output.mkdir(parents=True, exist_ok=True)
    files = [output / f"{NAME}.{suffix}" for suffix in ("json", "md", "png")]
    least = [least_eigenvalue(draw(seed, 1).inputs) for seed in range(scale.seeds)]
    plan = sweeps(scale)
    found = {one.sweep: one for one in load(files[0])}
    for sweep in plan:
        if sweep not in found:
            found[sweep] = Swept(sweep, run(sweep), where)
            _write(files[0], [found[one] for one in plan if one in found], least)
        tell(f"{plan.index(sweep) + 1} of {len(plan)} sweeps")
    done = [found[sweep] for sweep in plan]
    write_text(files[1], _markdown(done, least))
    _draw(done, files[2])
    return files


def _write(file: Path, done: Sequence[Swept], least: Sequence[float]) -> None:
    content = {
        "title": TITLE,
        "server": {"rate": SERVER_RATE, "steps": SERVER_STEPS},
        "lambda_0": least,
        "sweeps": [asdict(one) for one in done],
    }
    write_text(file, json.dumps(content, indent=1) + "\n")


def load(file: Path) -> list[Swept]:
    """Return the sweeps that a JSON file of ``conduct`` has; none if there is no file."""
    if not file.exists():
        return []
    found = []
    for one in json.loads(file.read_text())["sweeps"]:
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in one["sweep"].items()
        }
        cells = [Cell(**cell) for cell in one["cells"]]
        found.append(Swept(Sweep(**settings), cells, one["where"]))
    return found


def _title(sweep: Sweep) -> str:
    labels = "clients agree (control)" if sweep.shared else "Appendix D's labels"
    fixed = f"K = {sweep.steps[0]}" if sweep.by_width else f"m = {sweep.widths[0]}"
    rate = "" if sweep.rate == 0.1 else f", eta = {sweep.rate:g}"
    return f"{labels}, {fixed}{rate}"


def _markdown(done: Sequence[Swept], least: Sequence[float]) -> str:
    step = median(least) / 200**2
    lines = [
        f"# {TITLE}",
        "",
        "Two clients of 100 records in the plane, f(x) = m^-1/2 sum_r a_r relu(w_r . x), "
        f"full-batch descent at eta = 0.1, server's eta_S = {SERVER_RATE:g}, float64. Training "
        f"loss of all records, median and in brackets mean over {done[0].sweep.seeds} seeds (the "
        "paper averages 50 and 10). W* is Lemma 1's limit, from the singular value decomposition "
        "of all clients' features.",
        "",
        f"lambda_0 of Definition 1: {min(least):.1e} to {max(least):.1e}, median "
        f"{median(least):.1e}. The theorem asks for step sizes of the order lambda_0 / N^2 = "
        f"{step:.0e} and widths above N^9 / lambda_0^8; neither can be run, nor did the paper.",
        "",
        *_FOUND,
    ]
    for one in done:
        lines += ["", f"## {_title(one.sweep)}", "", *_losses(one), "", *_shapes(one)]
        lines += ["", *_distances(one)]
    where = done[-1].where
    lines += ["", f"Run at {where['commit']}, {where['cpu']}, {where['time']}."]
    return "\n".join(lines) + "\n"


_FOUND: tuple[str, ...] = ()


def _at(one: Swept, cell: Cell) -> int:
    return cell.width if one.sweep.by_width else cell.steps


def _lines(one: Swept) -> list[str]:
    return [name for name in _LINES if name in one.cells[0].values]


def _figure(value: float) -> str:
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.2g}"


def _grid(one: Swept, names: Sequence[str], labels: Sequence[str]) -> list[str]:
    head = ["m" if one.sweep.by_width else "K", *labels]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for cell in one.cells:
        figures = [cell.values[name] for name in names]
        shown = [f"{_figure(median(values))} ({_figure(mean(values))})" for values in figures]
        rows.append("| " + " | ".join([str(_at(one, cell)), *shown]) + " |")
    return rows


def _losses(one: Swept) -> list[str]:
    names = _lines(one)
    return _grid(one, names, [_LINES[name] for name in names])


def _distances(one: Swept) -> list[str]:
    names = ["rank", "patience", *_DISTANCES]
    labels = ["rank of sum F", "steps T to W*"]
    labels += [f"furthest neuron, {label}" for label in _DISTANCES.values()]
    return _grid(one, names, labels)


def _shapes(one: Swept) -> list[str]:
    """Return how each line runs: at how many doublings it falls, whether it ends in a rise."""
    steps, seeds = len(one.cells) - 1, one.sweep.seeds
    rows = [
        f"| line | doublings, of {steps}, at which the median falls (the mean) | least median at "
        f"(mean) | last over least, median (mean) | seeds, of {seeds}, whose last is above their "
        "loss where the median is least |",
        "|---" * 5 + "|",
    ]
    for name in _lines(one):
        falls, least, ratios = [], [], []
        for summary in (median, mean):
            values = [summary(cell.values[name]) for cell in one.cells]
            falls.append(sum(b < a for a, b in pairwise(values)))
            least.append(one.cells[values.index(min(values))])
            ratios.append(values[-1] / min(values))
        ends = zip(one.cells[-1].values[name], least[0].values[name], strict=True)
        cells = [
            _LINES[name],
            f"{falls[0]} ({falls[1]})",
            f"{_at(one, least[0])} ({_at(one, least[1])})",
            f"{ratios[0]:.2f} ({ratios[1]:.2f})",
            str(sum(last > at for last, at in ends)),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _draw(done: Sequence[Swept], file: Path) -> None:
    """Draw medians with quartiles: losses by width and by K, distances by width, a row for each."""
    shown = [one for one in done if one.sweep.rate == 0.1]
    figure = require_matplotlib()(figsize=(14, 8), layout="constrained")
    panels = figure.subplots(2, 3)
    for row, shared in zip(panels, (False, True), strict=True):
        by_width, by_steps = (
            next(o for o in shown if (o.sweep.shared, o.sweep.by_width) == (shared, wide))
            for wide in (True, False)
        )
        for panel, one in ((row[0], by_width), (row[1], by_steps)):
            for name in [line for line in _lines(one) if line != "linear"]:
                _line(panel, one, name, _LINES[name], _COLOURS[name])
            panel.set(ylabel="loss on all records", title=_title(one.sweep))
        for n, (name, label) in enumerate(_DISTANCES.items()):
            _line(row[2], by_width, name, label, f"C{n}")
        widths = by_width.sweep.widths
        middle = median(by_width.cells[0].values["apart"])
        guide = [middle * (widths[0] / width) ** 0.5 for width in widths]
        row[2].plot(widths, guide, "--", color="black", lw=1, label="slope of m^-1/2")
        row[2].set(ylabel="distance of the furthest neuron", title=_title(by_width.sweep))
    for panel in panels[:, [0, 2]].flat:
        panel.set(xlabel="width m")
    for panel in panels[:, 1]:
        panel.set(xlabel="local steps K")
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.title.set_fontsize("medium")
    panels[1, 1].legend(fontsize="x-small")
    panels[1, 2].legend(fontsize="x-small")
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=110, format="png")


def _line(panel: Any, one: Swept, name: str, label: str, colour: str) -> None:
    places = [_at(one, cell) for cell in one.cells]
    spread = [quantiles(cell.values[name], n=4, method="inclusive") for cell in one.cells]
    low, middle, high = zip(*spread, strict=True)
    panel.loglog(places, middle, "o-", ms=3, lw=1.3, base=2, color=colour, label=label)
    panel.set_yscale("log", base=10)
    panel.fill_between(places, low, high, color=colour, alpha=0.12, lw=0)
