"""The training benchmark runs every form, and says what was met and what was missed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks.timing import Spread
from benchmarks.training import report, scaling
from benchmarks.training.forms import FORMS
from benchmarks.training.measure import FormResult, WorkloadResult, measure
from benchmarks.training.models import WORKLOADS, Workload, low_rank_transformer, mlp

TINY = Workload("tiny", lambda: mlp(12, 8), lambda: torch.randn(6, 12), {"DP-SGD": 1e9})


@pytest.fixture(scope="module")
def tiny():
    return measure(TINY, list(FORMS), seconds=0.0)


def test_every_form_is_measured(tiny):
    assert [form.name for form in tiny.forms] == list(FORMS)
    for form in tiny.forms:
        assert not form.failed, f"{form.name}: {form.failed}"
        assert form.milliseconds.median > 0 and form.samples_per_second > 0
        assert form.peak_bytes > sum(4 * p.numel() for p in mlp(12, 8).parameters())
    assert tiny.of("plain SGD").ratio == 1.0 == tiny.of("plain SGD").memory_ratio


def test_stored_gradients_show_in_the_memory():
    # 64 copies of 2 x 64 x 64 weights against one: what the reading must not miss.
    workload = Workload("wide", lambda: mlp(64, 64), lambda: torch.randn(64, 64), {})
    result = measure(workload, ["plain SGD", "DP-SGD", "Opacus hooks"], seconds=0.0)
    assert result.of("Opacus hooks").memory_ratio > 8
    assert result.of("DP-SGD").memory_ratio < 2


@pytest.mark.parametrize("name", ["MLP", "transformer"])
def test_memory_is_within_its_bound(name):
    workload = next(w for w in WORKLOADS if w.name.startswith(name))
    result = measure(workload, ["plain SGD", "DP-SGD", "full rank"], seconds=0.0)
    assert result.of("DP-SGD").memory_ratio <= 1.3 and result.of("full rank").memory_ratio <= 1.3


def spread(milliseconds):
    return Spread(milliseconds, milliseconds, milliseconds, milliseconds, milliseconds, 3)


def test_the_table_says_what_was_met_and_what_was_missed():
    forms = [
        FormResult("plain SGD", spread(10.0), 1.0),
        FormResult("DP-SGD", spread(12.0), 1.2, memory_ratio=1.1),
        FormResult("rank 64", spread(15.0), 1.5),
        FormResult("Opacus ghost", failed="ValueError: no"),
    ]
    result = WorkloadResult("model", 4, 10, {"DP-SGD": 1.25, "rank 64": 1.4}, forms)
    row = report.table([result]).splitlines()[2]
    assert "10.0 ms" in row and "1.20x (1.1x memory), target 1.25x met" in row
    assert "1.50x, target 1.4x missed" in row and "failed" in row


def test_results_are_written_with_their_provenance(tiny, tmp_path):
    report.write(tmp_path / "training.json", {"commit": "abc"}, {"models": [tiny]})
    content = json.loads((tmp_path / "training.json").read_text())
    assert content["provenance"] == {"commit": "abc"}
    assert report.read(tmp_path / "training.json") == ({"commit": "abc"}, {"models": [tiny]})
    assert content["results"]["models"][0]["forms"][1]["name"] == "DP-SGD"
    report.bars([tiny], tmp_path / "bars.png", "title")
    report.curves({"size": ((1, 2), [tiny, tiny])}, tmp_path / "curves.png", "title")
    assert all((tmp_path / name).stat().st_size > 0 for name in ("bars.png", "curves.png"))


def test_the_named_models_are_what_their_names_say():
    sizes = {
        w.name.split(",")[0]: sum(p.numel() for p in w.model().parameters()) for w in WORKLOADS
    }
    assert sizes["MLP 784-512-512-10"] == 784 * 512 + 512 * 512 + 512 * 10 + 2 * 512 + 10
    assert sizes["CNN 16-32-128-10"] == 160 + 4640 + 1568 * 128 + 128 + 1290
    assert 0.26e6 < sizes["ResNet-20"] < 0.29e6  # He et al. 2016: 0.27 M
    trained = [p for p in low_rank_transformer().parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) < 0.03 * sizes["LoRA rank 8"]


def test_axes_grow_in_what_they_name():
    for axis in scaling.AXES:
        small, large = (axis.workload(size) for size in axis.sizes[:2])
        x, y = small.inputs(), large.inputs()
        widths = [sum(p.numel() for p in w.model().parameters()) for w in (small, large)]
        assert x.shape != y.shape or widths[0] < widths[1]
        assert isinstance(small.model(), nn.Module)
