"""Run a case: check every form's output, find the fastest plain one, compile it, time them in turn.

No speed is reported for an operation whose outputs do not match: the case ends after the check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import dpkernels
from benchmarks.accuracy import Judge
from benchmarks.compiled import compile_form, forget_compiled, time_limit
from benchmarks.machine import GEMM_SIZE, best_rate, probes
from benchmarks.memory import peak_extra_memory
from benchmarks.registry import Case, Form, Inputs, Outputs, make_inputs
from benchmarks.results import Kind, Measurement, Result
from benchmarks.timing import Budget, Spread, interleave, measure

# A plain form that is this much slower than the fastest in the first rounds will not overtake it.
_HOPELESS = 1.5
_SCREENING_ROUNDS = 7


@dataclass(frozen=True)
class Options:
    """How to run: how long, with ``torch.compile`` or not, and how long that may take.

    gemm_size: of the matrix product that is the bound of cases made of products.
    """

    budget: Budget
    compile: bool = True
    compile_seconds: int = 180
    gemm_size: int = GEMM_SIZE


@dataclass
class _Contender:
    """A form with its arguments and what is known about it."""

    form: Form
    run: Callable[..., Outputs]
    arguments: tuple[Any, ...]
    found: Measurement
    times: list[float] = field(default_factory=list)

    def __call__(self) -> Outputs:
        return self.run(*self.arguments)


def run_case(case: Case, device: torch.device, options: Options) -> Result:
    """Check and time one case; see ``Result`` for what comes back."""
    inputs = make_inputs(case, device)
    judge = Judge(case, inputs)
    ours = _checked("ours", case.ours, inputs, judge)
    plain = [_checked("plain", form, inputs, judge) for form in case.plain if form.eager]
    backend = dpkernels.explain(case.op, device, case.dtype).chosen
    result = Result(
        op=case.op,
        name=case.name,
        parameters=case.parameters,
        dtype=str(case.dtype).removeprefix("torch."),
        device=device.type,
        backend=backend or "none",
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        bound_kind=case.bound,
        allowed_error=judge.allowed,
        target=case.target,
        measurements=[ours.found, *(p.found for p in plain)],
    )
    if ours.found.status != "ok":
        return result
    running = _screened(case, plain, device)
    compiled = _compiled(case, running, inputs, judge, options)
    result.measurements += [c.found for c in compiled]
    running = [ours, *running, *(c for c in compiled if c.found.status == "ok")]
    _time(case, result, running, device, options)
    return result


def _checked(
    kind: Kind, form: Form, inputs: Inputs, judge: Judge, options: Options | None = None
) -> _Contender:
    """Call a form once (compiled, if ``options`` are given) and judge what it returns."""
    found = Measurement(form.name, kind)
    run = form.run if options is None else compile_form(form.run)
    contender = _Contender(form, run, form.arguments(inputs), found)
    try:
        if options is None:
            outputs = contender()
        else:
            with time_limit(options.compile_seconds):
                outputs = contender()
    except Exception as error:  # a form that cannot run is a finding, whatever it raises
        found.status, found.reason = "failed", f"{type(error).__name__}: {_first_line(error)}"
    else:
        judge.judge(outputs, found)
    return contender


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"


def _screened(case: Case, plain: list[_Contender], device: torch.device) -> list[_Contender]:
    """Return the right plain forms, fastest first, without the hopeless ones."""
    right = [p for p in plain if p.found.status == "ok"]
    if not right:
        return []
    interleave(right, 1, device)
    samples = interleave(right, _SCREENING_ROUNDS, device)
    # The least of a few times is the one that was disturbed least.
    ranked = sorted(zip(right, samples, strict=True), key=lambda pair: min(pair[1]))
    fastest = min(ranked[0][1])
    kept = []
    for contender, times in ranked:
        if min(times) <= _HOPELESS * fastest or contender.form.name == case.target.against:
            kept.append(contender)
        else:
            _record_times(case, contender.found, Spread.of(times))
            contender.found.status = "slower"
            contender.found.reason = f"{min(times) / fastest:.1f}x the time of the fastest"
    return kept


def _compiled(
    case: Case, running: list[_Contender], inputs: Inputs, judge: Judge, options: Options
) -> list[_Contender]:
    """Compile the fastest plain form that can be, and those written for the compiler."""
    if not options.compile:
        return []
    fastest = [c.form for c in running if c.form.compilable][:1]
    chosen = fastest + [form for form in case.plain if not form.eager]
    forget_compiled()
    return [_checked("compiled", form, inputs, judge, options) for form in chosen]


def _time(
    case: Case, result: Result, running: list[_Contender], device: torch.device, options: Options
) -> None:
    """Time everything in turn, the bound's probes too, and fill in the result."""
    bound_probes = probes(case.bound, case.bytes_moved, device, options.gemm_size)
    probing = [probe.call for probe in bound_probes]
    times = measure([*running, *probing], options.budget, device)
    for contender, sample in zip(running, times, strict=False):
        contender.times = sample
        _record_times(case, contender.found, Spread.of(sample))
    ours = running[0]
    plain, compiled = _fastest(running, "plain"), _fastest(running, "compiled")
    named = plain
    if case.target.against is not None:
        named = _fastest([c for c in running if c.found.name == case.target.against], "plain")
    result.fastest_plain = None if plain is None else plain.found.name
    result.fastest_compiled = None if compiled is None else compiled.found.name
    result.speedup = _speedup(plain, ours)
    result.compiled_speedup = _speedup(compiled, ours)
    result.target_speedup = _speedup(named, ours)
    result.bound = best_rate(bound_probes, times[len(running) :])
    reached = ours.found.gflop_per_s if case.bound == "gemm" else ours.found.gb_per_s
    assert reached is not None
    result.percent_of_bound = 100 * reached / result.bound.per_second
    for contender in running:
        contender.found.memory = peak_extra_memory(contender, device)


def _record_times(case: Case, found: Measurement, milliseconds: Spread) -> None:
    found.milliseconds = milliseconds
    found.gb_per_s = case.bytes_moved / milliseconds.median / 1e6
    found.gflop_per_s = case.flops / milliseconds.median / 1e6


def _fastest(running: list[_Contender], kind: Kind) -> _Contender | None:
    of_kind = [c for c in running if c.found.kind == kind]
    return min(of_kind, key=lambda c: Spread.of(c.times).median, default=None)


def _speedup(theirs: _Contender | None, ours: _Contender) -> Spread | None:
    """Return how many times as fast ours is: ratio of medians, quantiles of the rounds' ratios."""
    if theirs is None:
        return None
    paired = Spread.of([a / b for a, b in zip(theirs.times, ours.times, strict=True)])
    median = Spread.of(theirs.times).median / Spread.of(ours.times).median
    return replace(paired, median=median)
