"""Show a report: a table for the terminal, one for the README, and a picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Measurement, Report, Result
from benchmarks.timing import Spread

_NOT_AVAILABLE = "n/a"


def table(report: Report) -> str:
    """Return the report as an aligned table, with what went wrong below it."""
    rows = [_row(result) for result in report.results]
    lines = [_machine(report)]
    if rows:
        lines += _aligned([list(rows[0]), *(list(row.values()) for row in rows)])
    if report.startup is not None:
        lines.append(_startup(report))
    return "\n".join([*lines, *_notes(report)])


def markdown(report: Report) -> str:
    """Return the report as the README shows it."""
    rows = [_readme_row(result) for result in report.results]
    lines = [_provenance(report), ""]
    if rows:
        lines.append(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
    if report.startup is not None:
        lines += ["", _startup(report) + "."]
    return "\n".join([*lines, "", _machine(report)])


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rewrite_section(readme: Path, name: str, text: str) -> None:
    """Replace what stands between the two marks of that name in ``readme`` by ``text``.

    Raises ValueError unless each mark is there once, in order.
    """
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    content = readme.read_text()
    before, begin, rest = content.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in rest or last in before + after:
        raise ValueError(
            f"rewrite_section: {readme.name} must have one line {first} and, after it, one line "
            f"{last}; put them where the table belongs"
        )
    readme.write_text(f"{before}{first}\n{text}\n{last}{after}")


def picture(report: Report, path: Path) -> None:
    """Draw the speed-up of every case as a bar, over plain PyTorch and over its compiled form.

    Whiskers go from the 10th to the 90th percentile of the rounds. Needs matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [result for result in report.results if result.speedup is not None]
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.26 * len(shown)), layout="constrained")
    series = (
        ("fastest plain PyTorch form", "#2a6f97", -0.19, [r.speedup for r in shown]),
        ("torch.compile of it", "#e09f3e", 0.19, [r.compiled_speedup for r in shown]),
    )
    for label, colour, offset, speedups in series:
        bars = [(row + offset, s) for row, s in enumerate(speedups) if s is not None]
        if not bars:
            continue
        positions, medians = [p for p, _ in bars], [s.median for _, s in bars]
        whiskers = [
            [max(0.0, s.median - s.p10) for _, s in bars],
            [max(0.0, s.p90 - s.median) for _, s in bars],
        ]
        lengths = [median - 1.0 for median in medians]
        axes.barh(
            positions, lengths, 0.36, 1.0, xerr=whiskers, color=colour, label=label, capsize=2
        )
        for position, s in bars:
            end = max(s.median, s.p90, 1.0)
            axes.annotate(
                f"{s.median:.2f}x",
                (end, position),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [result.name for result in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    largest = max((r.speedup.p90 for r in shown if r.speedup is not None), default=1.0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.125, 2 * max(largest, 2.0))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlabel("speed-up (whiskers: 10th to 90th percentile)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_where(report), fontsize=9)
    if shown:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _row(result: Result) -> dict[str, str]:
    """Return a line of the table, by column. A wrong result shows its error and no speed."""
    ours = result.ours
    plain = result.named("plain", result.fastest_plain)
    compiled = result.named("compiled", result.fastest_compiled)
    verdict = _speedup(result.speedup)
    if not result.correct:
        verdict = f"{ours.status.upper()}: {ours.reason}"
    return {
        "case": result.name,
        "backend": result.backend,
        "ours ms": _milliseconds(ours),
        "plain ms": _milliseconds(plain),
        "speed-up": verdict,
        "compiled ms": _milliseconds(compiled),
        "over compiled": _speedup(result.compiled_speedup),
        "rate": _rate(result),
        "of bound": _share(result),
        "extra MB (tensors/resident): ours, plain": f"{_megabytes(ours)}, {_megabytes(plain)}",
        "fastest plain form": result.fastest_plain or _NOT_AVAILABLE,
        "target": _target(result),
    }


def _readme_row(result: Result) -> dict[str, str]:
    row = _row(result)
    plain = f"{row['plain ms']} ms (`{row['fastest plain form']}`)"
    return {
        "case": row["case"],
        "dpkernels": f"{row['ours ms']} ms" if result.correct else _NOT_AVAILABLE,
        "fastest plain PyTorch": plain if result.fastest_plain else _NOT_AVAILABLE,
        "speed-up (quartiles)": f"**{row['speed-up']}**",
        "over `torch.compile` of it": row["over compiled"],
        "rate": row["rate"],
        "of bound": row["of bound"],
        "extra MB (tensors/resident): ours, plain": row["extra MB (tensors/resident): ours, plain"],
        "target": row["target"],
    }


def _rate(result: Result) -> str:
    gflops, gigabytes = result.ours.gflop_per_s, result.ours.gb_per_s
    if gflops is None or gigabytes is None:
        return _NOT_AVAILABLE
    return f"{gflops:.1f} GFLOP/s" if result.bound_kind == "gemm" else f"{gigabytes:.1f} GB/s"


def _share(result: Result) -> str:
    if result.percent_of_bound is None:
        return _NOT_AVAILABLE
    return f"{result.percent_of_bound:.0f}% {result.bound_kind}"


def _milliseconds(measurement: Measurement | None) -> str:
    if measurement is None or measurement.milliseconds is None:
        return _NOT_AVAILABLE
    return f"{measurement.milliseconds.median:.3g}"


def _speedup(speedup: Spread | None) -> str:
    if speedup is None:
        return _NOT_AVAILABLE
    return f"{speedup.median:.2f}x ({speedup.p25:.2f}-{speedup.p75:.2f})"


def _megabytes(measurement: Measurement | None) -> str:
    """Return tensors/resident, as ``memory`` tells them apart."""
    if measurement is None or measurement.memory is None:
        return _NOT_AVAILABLE
    memory = measurement.memory
    resident = _NOT_AVAILABLE if memory.resident is None else f"{memory.resident / 1e6:.3g}"
    return f"{memory.allocated / 1e6:.3g}/{resident}"


def _target(result: Result) -> str:
    met = result.target_met()
    if met is None:
        return ""
    target = result.target
    parts = []
    if target.ratio is not None:
        against = target.against or "the fastest plain form"
        found = _NOT_AVAILABLE
        if result.target_speedup is not None:
            found = f"{result.target_speedup.median:.2f}x"
        parts.append(f"{found} of {target.ratio:g}x over {against}")
    if target.percent_of_bound is not None:
        found = _NOT_AVAILABLE
        if result.percent_of_bound is not None:
            found = f"{result.percent_of_bound:.0f}%"
        parts.append(f"{found} of {target.percent_of_bound:g}%")
    if target.memory_fraction is not None:
        fraction = result.memory_fraction()
        found = _NOT_AVAILABLE if fraction is None else f"{fraction:.3f}"
        parts.append(f"{found} of at most {target.memory_fraction:g} of its memory")
    if target.megabytes is not None:
        memory = result.ours.memory
        found = _NOT_AVAILABLE if memory is None else f"{memory.at_most / 1e6:.3g}"
        parts.append(f"{found} of at most {target.megabytes:g} MB")
    return f"{'met' if met else 'MISSED'}: {', '.join(parts)}"


def _startup(report: Report) -> str:
    startup = report.startup
    assert startup is not None
    verdict = "met" if startup.target_met() else "MISSED"
    seconds = startup.seconds
    return (
        f"import dpkernels, after torch: {seconds.median:.3f} s ({seconds.p25:.3f}-"
        f"{seconds.p75:.3f}), torch itself {startup.torch_seconds.median:.2f} s; target under "
        f"{startup.limit:g} s: {verdict}"
    )


def _machine(report: Report) -> str:
    units = {"read": "GB/s", "update": "GB/s", "gemm": "GFLOP/s", "normals": "G/s"}
    rates = [
        f"{kind} {rate.per_second:.3g} {units[kind]} ({rate.best})"
        for kind, rate in report.machine.items()
    ]
    return "This machine in the same run, from memory: " + ", ".join(rates) + "."


def _where(report: Report) -> str:
    p = report.provenance
    dirty = " with uncommitted changes" if p["dirty"] else ""
    device = p["cpu"] if p["device"] == "cpu" else p["device"]
    return (
        f"{device}, {p['threads']} threads, {p['instruction_set']['dpkernels']}; torch "
        f"{p['versions']['torch']}; commit {p['commit'][:9]}{dirty}, {p['time'][:10]}"
    )


def _provenance(report: Report) -> str:
    replaced = "".join(
        f" Measured later, at {commit[:9]}: {'; '.join(names)}."
        for commit, names in report.provenance.get("replaced", {}).items()
    )
    return (
        f"Median of interleaved rounds in one process, on {_where(report)}. Every output was "
        f"checked against float64 first. Reproduce with `make bench`.{replaced}"
    )


def _notes(report: Report) -> list[str]:
    """Return a line for every form that was refused or did not run."""
    return [
        f"{result.name}: {m.kind} '{m.name}' {m.status}: {m.reason}"
        for result in report.results
        for m in result.measurements
        if m.kind != "ours" and m.status in ("mismatch", "failed")
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]
