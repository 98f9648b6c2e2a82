"""Time every form of one workload in turn, and its peak memory."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.memory import PeakMemory, peak_extra_memory
from benchmarks.timing import Spread, interleave
from benchmarks.training.forms import FORMS, Step, quietly
from benchmarks.training.models import Workload

_CPU = torch.device("cpu")
# A form that takes this much longer than plain SGD is timed in a few rounds only.
_SLOW, _SLOW_ROUNDS = 6.0, 5
_FEWEST_ROUNDS, _MOST_ROUNDS = 11, 200


@dataclass
class FormResult:
    """One form: milliseconds a step, its ratio to plain SGD in the same rounds, peak memory.

    memory: on top of weights, inputs and factors, from a start without gradients.
    peak_bytes: tensors of it, plus the weights; memory_ratio: that, as a multiple of plain SGD's.
    failed: the reason where it could not run.
    """

    name: str
    milliseconds: Spread | None = None
    ratio: float | None = None
    memory: PeakMemory | None = None
    peak_bytes: int | None = None
    memory_ratio: float | None = None
    samples_per_second: float | None = None
    failed: str = ""


@dataclass
class WorkloadResult:
    """All forms of one workload."""

    name: str
    batch: int
    parameters: int
    bounds: dict[str, float]
    forms: list[FormResult] = field(default_factory=list)

    def of(self, name: str) -> FormResult | None:
        """Return a form by name, if it was measured."""
        return next((form for form in self.forms if form.name == name), None)


def measure(workload: Workload, names: Sequence[str], seconds: float) -> WorkloadResult:
    """Run the forms of ``workload`` in turn, for about ``seconds`` in all."""
    torch.manual_seed(0)
    model = workload.model()
    x, y = workload.batch()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    result = WorkloadResult(workload.name, x.shape[0], trained, workload.bounds)
    steps, models = {}, {}
    for name in names:
        form = FormResult(name)
        result.forms.append(form)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copied = copy.deepcopy(model)
                step = quietly(FORMS[name])(copied, x, y)
                step()
                start = time.perf_counter()
                step()
            steps[name] = step, time.perf_counter() - start
            models[name] = copied
        except Exception as error:
            form.failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    base = steps["plain SGD"][1]
    fast = [name for name, (_, cost) in steps.items() if cost < _SLOW * base]
    slow = [name for name in steps if name not in fast]
    _time(result, {name: steps[name][0] for name in fast}, seconds)
    for name in slow:
        _time(result, {n: steps[n][0] for n in ("plain SGD", name)}, 0.0, only=name)
    weights = sum(p.nbytes for p in model.parameters())
    for name, (step, _) in steps.items():
        found = result.of(name)
        assert found is not None
        _clear(models[name])
        found.memory = peak_extra_memory(step, _CPU)
        found.peak_bytes = weights + found.memory.allocated
    plain = result.of("plain SGD")
    assert plain is not None and plain.peak_bytes is not None
    for form in result.forms:
        if form.peak_bytes is not None:
            form.memory_ratio = form.peak_bytes / plain.peak_bytes
    return result


def _clear(model: nn.Module) -> None:
    """Drop what earlier steps left at the parameters."""
    for parameter in model.parameters():
        for attribute in ("grad", "grad_sample", "summed_grad", "_norm_sample"):
            if getattr(parameter, attribute, None) is not None:
                setattr(parameter, attribute, None)
    gc.collect()


def _time(
    result: WorkloadResult, steps: Mapping[str, Step], seconds: float, only: str | None = None
) -> None:
    calls = list(steps.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once = sum(times[0] for times in interleave(calls, 1, _CPU)) / 1e3
        rounds = min(max(int(seconds / once), _FEWEST_ROUNDS), _MOST_ROUNDS)
        times = interleave(calls, _SLOW_ROUNDS if only else rounds, _CPU)
    base = Spread.of(times[list(steps).index("plain SGD")]).median
    for name, milliseconds in zip(steps, times, strict=True):
        form = result.of(name)
        if form is None or (only is not None and name != only):
            continue
        form.milliseconds = Spread.of(milliseconds)
        form.ratio = form.milliseconds.median / base
        form.samples_per_second = 1e3 * result.batch / form.milliseconds.median
