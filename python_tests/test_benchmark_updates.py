"""Some cases measured again: what replaces what, and outputs that are high on purpose."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import report, runner
from benchmarks.registry import Form
from benchmarks.results import Report
from python_tests.test_benchmarks import CPU, OPTIONS, a_report, clock, doubling, right

__all__ = ["clock"]  # a fixture


def test_newer_cases_replace_older_ones_and_say_so(clock):
    older = a_report(clock)
    slower = dataclasses.replace(older.results[0], flops=7)
    where = {**older.provenance, "commit": "fedcba9876543210"}
    both = older.with_newer(Report(where, older.machine, [slower]))
    assert both.results == [slower] and older.results[0].flops == 1000
    assert both.provenance["commit"] == "0123456789abcdef"
    assert "Measured later, at fedcba987: doubling" in report.markdown(both)
    assert "Measured later" not in report.markdown(older)


def test_a_case_that_the_older_report_lacks_is_refused(clock):
    older = a_report(clock)
    stranger = dataclasses.replace(older.results[0], name="another")
    with pytest.raises(ValueError, match="another"):
        older.with_newer(Report(older.provenance, older.machine, [stranger]))


@pytest.mark.parametrize(("raised", "correct"), [(0.0, False), (1e-4, False), (1e-2, True)])
def test_outputs_may_be_high_only_by_what_the_case_states(clock, raised, correct):
    def high(x):
        return [(x + x) * 1.005]

    ours = Form("ours", clock.taking(1.0, high), tuple)
    case = doubling(ours, Form("plain", clock.taking(2.0, right), tuple))
    result = runner.run_case(dataclasses.replace(case, raised=raised), CPU, OPTIONS)
    assert result.correct is correct
