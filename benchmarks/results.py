"""What a run found, and how it is kept as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import Rate
from benchmarks.memory import PeakMemory
from benchmarks.registry import Target
from benchmarks.timing import Spread

Kind = Literal["ours", "plain", "compiled"]
# slower: right, and left out after the first rounds. failed: raised, or did not compile in time.
Status = Literal["ok", "slower", "mismatch", "failed"]


@dataclass
class Measurement:
    """One form in one case.

    error: largest absolute error against the float64 truth; None for another random stream, and
        where there is no number (a NaN, or another shape).
    reason: why ``status`` is not "ok".
    milliseconds: None unless ``status`` is "ok" or "slower" (which has a few rounds only).
    """

    name: str
    kind: Kind
    status: Status = "ok"
    reason: str = ""
    error: float | None = None
    milliseconds: Spread | None = None
    gb_per_s: float | None = None
    gflop_per_s: float | None = None
    memory: PeakMemory | None = None


@dataclass
class Result:
    """One case: every form, and ours against the others.

    speedup: over the fastest plain form; compiled_speedup: over the fastest compiled one;
    target_speedup: over the form that the target names. The median is a ratio of medians, the
    quantiles are of the ratios within each round. None unless ours is right.
    bound: the rate that bounds the case, measured in its rounds.
    """

    op: str
    name: str
    parameters: dict[str, Any]
    dtype: str
    device: str
    backend: str
    bytes_moved: int
    flops: int
    bound_kind: str
    allowed_error: float | None
    target: Target
    measurements: list[Measurement]
    fastest_plain: str | None = None
    fastest_compiled: str | None = None
    speedup: Spread | None = None
    compiled_speedup: Spread | None = None
    target_speedup: Spread | None = None
    bound: Rate | None = None
    percent_of_bound: float | None = None

    @property
    def ours(self) -> Measurement:
        """The form that is ours."""
        return next(m for m in self.measurements if m.kind == "ours")

    @property
    def correct(self) -> bool:
        """Whether our outputs match."""
        return self.ours.status == "ok"

    def named(self, kind: Kind, name: str | None) -> Measurement | None:
        """Return the measurement of a form, or None."""
        matching = (m for m in self.measurements if m.kind == kind and m.name == name)
        return next(matching, None)

    def target_met(self) -> bool | None:
        """Return whether the target is reached, or None if the case has none."""
        target = self.target
        if not target:
            return None
        reached = [self.correct]
        if target.ratio is not None:
            speedup = self.target_speedup
            reached.append(speedup is not None and speedup.median >= target.ratio)
        if target.percent_of_bound is not None:
            percent = self.percent_of_bound
            reached.append(percent is not None and percent >= target.percent_of_bound)
        if target.memory_fraction is not None:
            fraction = self.memory_fraction()
            reached.append(fraction is not None and fraction <= target.memory_fraction)
        if target.megabytes is not None:
            memory = self.ours.memory
            reached.append(memory is not None and memory.at_most / 1e6 <= target.megabytes)
        return all(reached)

    def memory_fraction(self) -> float | None:
        """Return our extra memory as a part of that of the form that the target names.

        Of the two readings ours is the larger one and theirs the smaller one.
        """
        theirs = self.named("plain", self.target.against or self.fastest_plain)
        if self.ours.memory is None or theirs is None or theirs.memory is None:
            return None
        return self.ours.memory.at_most / max(1, theirs.memory.at_least)


@dataclass(frozen=True)
class Startup:
    """``import dpkernels`` in fresh processes, after torch: seconds of each, and the limit."""

    seconds: Spread
    torch_seconds: Spread
    limit: float

    def target_met(self) -> bool:
        """Return whether the median is under the limit."""
        return self.seconds.median < self.limit


@dataclass
class Report:
    """A whole run."""

    provenance: dict[str, Any]
    machine: dict[str, Rate]
    results: list[Result]
    startup: Startup | None = None
    quick: bool = False

    def with_newer(self, newer: Report) -> Report:
        """Return this report with the cases of ``newer`` in place of its own; says which."""
        found = {result.name: result for result in newer.results}
        unknown = found.keys() - {result.name for result in self.results}
        if unknown:
            raise ValueError(f"with_newer: not in the older report: {', '.join(sorted(unknown))}")
        replaced = dict(self.provenance.get("replaced", {}))
        replaced[newer.provenance["commit"]] = sorted(found)
        return Report(
            {**self.provenance, "replaced": replaced},
            self.machine,
            [found.get(result.name, result) for result in self.results],
            self.startup,
            self.quick,
        )

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read what ``write`` wrote."""
        data = json.loads(path.read_text())
        machine = {kind: Rate(**rate) for kind, rate in data.pop("machine").items()}
        results = [_result(entry) for entry in data.pop("results")]
        startup = data.pop("startup")
        if startup is not None:
            limit = startup.pop("limit")
            startup = Startup(**{k: Spread(**v) for k, v in startup.items()}, limit=limit)
        return cls(machine=machine, results=results, startup=startup, **data)


def _result(data: dict[str, Any]) -> Result:
    data["target"] = Target(**data["target"])
    data["bound"] = None if data["bound"] is None else Rate(**data["bound"])
    for name in ("speedup", "compiled_speedup", "target_speedup"):
        data[name] = _spread(data[name])
    for entry in data["measurements"]:
        entry["milliseconds"] = _spread(entry["milliseconds"])
        entry["memory"] = None if entry["memory"] is None else PeakMemory(**entry["memory"])
    data["measurements"] = [Measurement(**entry) for entry in data["measurements"]]
    return Result(**data)


def _spread(data: dict[str, Any] | None) -> Spread | None:
    return None if data is None else Spread(**data)
