"""Show what training costs: tables, JSON, pictures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.memory import PeakMemory
from benchmarks.report import markdown_table
from benchmarks.timing import Spread
from benchmarks.training.measure import FormResult, WorkloadResult

_COLOURS = {
    "plain SGD": "#888888",
    "DP-SGD": "#2a6f97",
    "full rank": "#014f86",
    "rank 64": "#61a5c2",
    "Opacus hooks": "#e09f3e",
    "Opacus ghost": "#9e2a2b",
    "vmap": "#bc8f5a",
}


_TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200)


def table(results: list[WorkloadResult]) -> str:
    """Return Markdown: times as multiples of plain SGD, with memory in brackets, targets marked."""
    names = [form.name for form in results[0].forms]
    rows = [[result.name, *(_cell(result, name) for name in names)] for result in results]
    return markdown_table(["model", "plain SGD", *names[1:]], rows)


def _cell(result: WorkloadResult, name: str) -> str:
    form = result.of(name)
    if form is None or form.milliseconds is None or form.ratio is None:
        return "failed" if form is not None and form.failed else "n/a"
    if name == "plain SGD":
        return f"{form.milliseconds.median:.1f} ms"
    text = f"{form.ratio:.2f}x"
    if form.memory_ratio is not None:
        text += f" ({form.memory_ratio:.1f}x memory)"
    bound = result.bounds.get(name)
    if bound is not None:
        text += f", target {bound:g}x {'met' if form.ratio <= bound else 'missed'}"
    return text


def write(path: Path, where: dict[str, Any], results: dict[str, list[WorkloadResult]]) -> None:
    """Write everything as JSON, with where it was measured."""
    content = {
        "provenance": where,
        "results": {name: [asdict(one) for one in found] for name, found in results.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[WorkloadResult]]]:
    """Return what ``write`` wrote."""
    content = json.loads(path.read_text())
    results = {
        name: [WorkloadResult(**{**one, "forms": list(map(_form, one["forms"]))}) for one in found]
        for name, found in content["results"].items()
    }
    return content["provenance"], results


def _form(stored: dict[str, Any]) -> FormResult:
    kinds = {"milliseconds": Spread, "memory": PeakMemory}
    parts = {key: kind(**stored[key]) for key, kind in kinds.items() if stored[key] is not None}
    return FormResult(**{**stored, **parts})


def bars(results: list[WorkloadResult], path: Path, title: str) -> None:
    """Draw the cost of every form as a multiple of plain SGD, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    columns = 3
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(12, 2.9 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, result in zip(axes.flat, results, strict=False):
        forms = [form for form in result.forms if form.ratio is not None]
        ratios = [form.ratio or 0.0 for form in forms]
        places = range(len(forms))
        lengths = [ratio - 1 for ratio in ratios]
        axis.barh(places, lengths, left=1, color=[_COLOURS[form.name] for form in forms])
        for place, ratio in zip(places, ratios, strict=True):
            axis.annotate(
                f"{ratio:.2f}x",
                (max(ratio, 1.0), place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axis.set_yticks(places, [form.name for form in forms], fontsize=8)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlim(min(0.95, *ratios) / 1.05, 1.6 * max(ratios))
        ticks = [tick for tick in _TICKS if tick < 1.5 * max(ratios)]
        axis.set_xticks(ticks if len(ticks) < 6 else ticks[::2], minor=False)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_title(result.name, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("time of a step, as a multiple of plain SGD", fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def curves(
    axes_results: dict[str, tuple[tuple[int, ...], list[WorkloadResult]]], path: Path, title: str
) -> None:
    """Draw milliseconds of a step over the size of each axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    count = len(axes_results)
    figure, axes = pyplot.subplots(
        1, count, figsize=(4.6 * count, 3.8), layout="constrained", squeeze=False
    )
    for axis, (name, (sizes, results)) in zip(axes.flat, axes_results.items(), strict=True):
        for form in (form.name for form in results[0].forms):
            points = []
            for size, result in zip(sizes, results, strict=True):
                found = result.of(form)
                if found is not None and found.milliseconds is not None:
                    points.append((size, found.milliseconds.median))
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=_COLOURS[form], label=form)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_title(name, fontsize=9)
        axis.set_ylabel("ms a step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
