"""The benchmarks are honest: what is wrong is refused, what is compared is the best there is."""

import json
import signal
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import machine, report, runner, timing
from benchmarks.compiled import CompileTimeout, time_limit
from benchmarks.machine import Probe, Rate
from benchmarks.memory import PeakMemory
from benchmarks.registry import Case, Form, Target, poisoned
from benchmarks.results import Report
from benchmarks.timing import Budget, interleave
from dpkernels import backend

CPU = torch.device("cpu")
OPTIONS = runner.Options(Budget(rounds=9), compile=False)


class Clock:
    """A clock that only moves when told to, so that speeds in these tests are exact."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def taking(self, milliseconds: float, function: Callable[..., list[Tensor]]):
        def run(*arguments):
            self.nanoseconds += round(milliseconds * 1e6)
            return function(*arguments)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: clock.nanoseconds)
    probe = Probe("probe", clock.taking(1.0, lambda: []), 4e6)
    monkeypatch.setattr(runner, "probes", lambda *_: [probe])
    return clock


def doubling(ours: Form, *plain: Form, target: Target | None = None) -> Case:
    """The operation ``2 x`` on 1,000 elements, 8,000 bytes."""
    return Case(
        op="row_sq_norms",
        name="doubling",
        dtype=torch.float32,
        make_inputs=lambda device, generator: [torch.rand(1000, generator=generator)],
        bytes_moved=8000,
        flops=1000,
        bound="read",
        ours=ours,
        plain=plain,
        truth=lambda inputs: [2 * inputs[0].double()],
        target=target or Target(),
    )


def right(x):
    return [x + x]


def wrong(x):
    doubled = x + x
    doubled[17] *= 1.001
    return [doubled]


def test_a_wrong_result_gets_no_speed(clock):
    case = doubling(
        Form("ours", clock.taking(1.0, wrong), tuple),
        Form("plain", clock.taking(9.0, right), tuple),
    )
    result = runner.run_case(case, CPU, OPTIONS)
    assert not result.correct and result.ours.status == "mismatch"
    assert result.speedup is None and result.ours.milliseconds is None
    assert result.percent_of_bound is None
    text = report.table(Report({}, {}, [result]))
    assert "MISMATCH" in text and f"{result.ours.error:.3g}" in text and "x (" not in text


@pytest.mark.parametrize(
    "ours",
    [
        Form("unwritten", lambda x, out: [out], lambda i: (i[0], poisoned(1000, like=i[0]))),
        Form("too short", lambda x: [(x + x)[:-1]], tuple),
        Form("nothing", lambda x: [], tuple),
    ],
    ids=lambda form: form.name,
)
def test_unwritten_or_missing_output_is_a_mismatch(clock, ours):
    result = runner.run_case(doubling(ours, Form("plain", right, tuple)), CPU, OPTIONS)
    assert result.ours.status == "mismatch"


def test_ours_raising_is_a_failure_with_its_reason(clock):
    def broken(x):
        raise RuntimeError("no such kernel")

    case = doubling(Form("ours", broken, tuple), Form("plain", right, tuple))
    result = runner.run_case(case, CPU, OPTIONS)
    assert not result.correct and "no such kernel" in result.ours.reason
    assert "FAILED" in report.table(Report({}, {}, [result]))


@pytest.mark.parametrize(("function", "code"), [(right, 0), (wrong, 1)])
def test_exit_code_says_whether_outputs_match(monkeypatch, tmp_path, capsys, clock, function, code):
    plain = Form("plain", clock.taking(2.0, right), tuple)
    case = doubling(Form("ours", clock.taking(1.0, function), tuple), plain)
    monkeypatch.setattr(command, "all_cases", lambda *_, **__: [case])
    monkeypatch.setattr(machine, "survey", lambda *_: {"read": Rate("sum", 1.0)})
    arguments = ["--quick", "--rounds", "9", "--only", "doubling", "--output", str(tmp_path)]
    assert command.main(arguments) == code
    assert ("MISMATCH" in capsys.readouterr().out) == bool(code)
    saved = json.loads((tmp_path / "kernels.json").read_text())
    assert (saved["results"][0]["speedup"] is None) == bool(code)
    assert {"commit", "dirty", "cpu", "threads", "versions", "time"} <= saved["provenance"].keys()
    assert (tmp_path / "kernels.png").stat().st_size > 0


def test_without_the_extension_nothing_is_measured_as_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "extension", None)
    monkeypatch.setattr(command, "run_case", lambda *_: pytest.fail("measured the reference"))
    with pytest.raises(SystemExit, match="make build"):
        command.main(["--only", "noise 670*", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_every_call_has_its_turn_and_follows_every_other():
    order = []
    calls = [lambda name=name: order.append(name) for name in "abc"]
    times = interleave(calls, 80, CPU)
    assert [len(sample) for sample in times] == [80, 80, 80]
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    # A given neighbourhood is missing from all rounds with probability (2/3)^80, about 1e-14.
    neighbours = {pair for names in rounds for pair in pairwise(names)}
    assert len(neighbours) == 6


def test_speedup_is_over_the_fastest_right_plain_form(clock):
    case = doubling(
        Form("ours", clock.taking(2.0, right), tuple),
        Form("usual", clock.taking(8.0, right), tuple),
        Form("fastest", clock.taking(6.0, right), tuple),
        Form("hopeless", clock.taking(60.0, right), tuple),
        Form("fast and wrong", clock.taking(1.0, wrong), tuple),
        target=Target(ratio=3.5, against="usual", percent_of_bound=100.0),
    )
    result = runner.run_case(case, CPU, OPTIONS)
    assert result.fastest_plain == "fastest"
    assert result.speedup is not None and result.speedup.median == 3.0
    assert result.target_speedup is not None and result.target_speedup.median == 4.0
    statuses = {m.name: m.status for m in result.measurements}
    assert statuses["hopeless"] == "slower" and statuses["fast and wrong"] == "mismatch"
    # 8,000 bytes in 2 ms against 4e6 bytes in 1 ms.
    assert result.percent_of_bound == pytest.approx(0.1)
    assert result.target_met() is False
    assert "MISSED: 4.00x of 3.5x" in report.table(Report({}, {}, [result]))


@pytest.mark.parametrize(("ratio", "met"), [(3.0, True), (3.1, False)])
def test_a_target_without_a_name_is_over_the_fastest(clock, ratio, met):
    case = doubling(
        Form("ours", clock.taking(2.0, right), tuple),
        Form("usual", clock.taking(8.0, right), tuple),
        Form("fastest", clock.taking(6.0, right), tuple),
        target=Target(ratio=ratio),
    )
    result = runner.run_case(case, CPU, OPTIONS)
    assert result.target_met() is met


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(memory_fraction=0.5), True),
        (Target(memory_fraction=0.49), False),
        (Target(megabytes=2.0), True),
        (Target(megabytes=1.9), False),
        (Target(ratio=9.0, memory_fraction=0.5), False),
    ],
)
def test_memory_is_judged_by_our_larger_and_their_smaller_reading(monkeypatch, clock, target, met):
    readings = {"ours": PeakMemory(1_000_000, 2_000_000), "plain": PeakMemory(4_000_000, 5_000_000)}
    monkeypatch.setattr(runner, "peak_extra_memory", lambda call, _: readings[call.form.name])
    case = doubling(
        Form("ours", clock.taking(2.0, right), tuple),
        Form("plain", clock.taking(8.0, right), tuple),
        target=target,
    )
    result = runner.run_case(case, CPU, OPTIONS)
    assert result.memory_fraction() == 0.5
    assert result.target_met() is met
    assert ("MISSED" in report.table(Report({}, {}, [result]))) is not met


def test_a_named_form_stays_however_slow_it_is(clock):
    case = doubling(
        Form("ours", clock.taking(1.0, right), tuple),
        Form("usual", clock.taking(50.0, right), tuple),
        Form("fastest", clock.taking(2.0, right), tuple),
        target=Target(ratio=10.0, against="usual"),
    )
    result = runner.run_case(case, CPU, OPTIONS)
    assert result.target_speedup is not None and result.target_speedup.median == 50.0


def test_compile_failure_is_reported_and_the_case_goes_on(monkeypatch, clock):
    def failing(run):
        def call(*arguments):
            raise RuntimeError("no compiler found\nsecond line")

        return call

    monkeypatch.setattr(runner, "compile_form", failing)
    case = doubling(
        Form("ours", clock.taking(1.0, right), tuple),
        Form("plain", clock.taking(2.0, right), tuple),
        Form("for the compiler", right, tuple, eager=False),
    )
    result = runner.run_case(case, CPU, runner.Options(Budget(rounds=9)))
    assert result.speedup is not None and result.speedup.median == 2.0
    assert result.compiled_speedup is None
    compiled = [m for m in result.measurements if m.kind == "compiled"]
    assert [m.name for m in compiled] == ["plain", "for the compiler"]
    assert {m.reason for m in compiled} == {"RuntimeError: no compiler found"}
    assert "no compiler found" in report.table(Report({}, {}, [result]))


def test_compiled_speedup_is_over_the_fastest_compiled_form(monkeypatch, clock):
    monkeypatch.setattr(runner, "compile_form", lambda run: run)
    case = doubling(
        Form("ours", clock.taking(1.0, right), tuple),
        Form("plain", clock.taking(4.0, right), tuple),
        Form("for the compiler", clock.taking(3.0, right), tuple, eager=False),
    )
    result = runner.run_case(case, CPU, runner.Options(Budget(rounds=9)))
    assert result.fastest_compiled == "for the compiler"
    assert result.compiled_speedup is not None and result.compiled_speedup.median == 3.0


def test_time_limit_interrupts_and_restores_the_signal():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(CompileTimeout, match="within 60 s"), time_limit(60):
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) == before


def a_report(clock) -> Report:
    case = doubling(
        Form("ours", clock.taking(2.0, right), tuple),
        Form("plain", clock.taking(6.0, right), tuple),
        target=Target(ratio=2.0),
    )
    where = {
        "cpu": "Some CPU",
        "device": "cpu",
        "threads": 2,
        "instruction_set": {"dpkernels": "avx2"},
        "versions": {"torch": "2"},
        "commit": "0123456789abcdef",
        "dirty": True,
        "time": "2020-01-02T03:04:05+00:00",
    }
    return Report(where, {"read": Rate("sum", 10.0)}, [runner.run_case(case, CPU, OPTIONS)])


def test_report_survives_json(tmp_path, clock):
    written = a_report(clock)
    written.write(tmp_path / "kernels.json")
    assert Report.read(tmp_path / "kernels.json") == written


BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"


def test_readme_section_is_rewritten_from_the_json(tmp_path, clock):
    a_report(clock).write(tmp_path / "kernels.json")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold figures\n{END}\nafter\n")
    for _ in range(2):
        assert command.main(["--readme", str(readme), "--output", str(tmp_path)]) == 0
        text = readme.read_text()
        assert text.startswith(f"before\n{BEGIN}\n")
        assert text.endswith(f"\n{END}\nafter\n")
        assert "old figures" not in text and "3.00x" in text and "met: 3.00x of 2x" in text
        assert "012345678 with uncommitted changes" in text


@pytest.mark.parametrize("content", ["no marks", f"{END}\n{BEGIN}", BEGIN])
def test_readme_without_marks_is_left_alone(tmp_path, content):
    readme = tmp_path / "README.md"
    readme.write_text(content)
    with pytest.raises(ValueError, match="kernels:begin"):
        report.rewrite_section(readme, "kernels", "figures")
    assert readme.read_text() == content
