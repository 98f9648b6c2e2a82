"""The same cases under pytest-benchmark: ``pytest benchmarks --benchmark-enable``.

Each form is a test, grouped by case. Where our output is wrong the test fails before anything is
timed; a plain form whose error is too large is skipped, as the runner refuses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.accuracy import Judge
from benchmarks.registry import Case, Form, Inputs, all_cases, make_inputs
from benchmarks.results import Measurement

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.lru_cache(maxsize=1)  # tests come case by case; one case's inputs may be 256 MB
def _prepared(name: str) -> tuple[Inputs, Judge]:
    case = next(case for case in all_cases(_DEVICE) if case.name == name)
    inputs = make_inputs(case, _DEVICE)
    return inputs, Judge(case, inputs)


def _forms() -> list[object]:
    return [
        pytest.param(case, form, id=f"{case.name}: {form.name}")
        for case in all_cases(_DEVICE)
        for form in (case.ours, *case.plain)
        if form.eager
    ]


@pytest.mark.parametrize(("case", "form"), _forms())
def test_form(benchmark: BenchmarkFixture, case: Case, form: Form) -> None:
    """Time a form whose output is right."""
    inputs, judge = _prepared(case.name)
    arguments = form.arguments(inputs)
    found = Measurement(form.name, "ours" if form is case.ours else "plain")
    judge.judge(form.run(*arguments), found)
    if found.status == "mismatch" and found.kind == "plain":
        pytest.skip(found.reason)
    assert found.status == "ok", found.reason
    benchmark.group = case.name
    benchmark.extra_info["bytes_moved"] = case.bytes_moved
    benchmark(_synchronised(form), *arguments)


def _synchronised(form: Form) -> Callable[..., object]:
    if _DEVICE.type == "cpu":
        return form.run

    def run(*arguments: object) -> None:
        form.run(*arguments)
        torch.cuda.synchronize()

    return run
