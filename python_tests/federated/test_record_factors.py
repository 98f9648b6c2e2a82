"""What a record changes of the sum over clipped factors is bounded, whatever records there are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpkernels.federated.fisher_vectors import FisherLayout, packed_fisher
from dpkernels.federated.model import _layers
from dpkernels.federated.record_factors import (
    at_a_time,
    check_modules,
    factor_sums,
    mean_sizes,
    moved_by_one,
    record_signs,
)
from dpkernels.fisher.errors import sign_errors
from dpkernels.fisher.estimate import information
from python_tests.federated.fedfisher_cases import CLASSES, NETWORKS, inputs, network

CASES = [(name, kind) for name in NETWORKS for kind in ("kronecker", "diagonal")]


def layout_of(model, kind):
    return FisherLayout(kind, tuple(_layers(model)))


def sums(model, x, layout, clips, ids=None, *, seed=3, most=4):
    ids = torch.arange(len(x)) if ids is None else ids
    return factor_sums(model, x, ids, layout, clips, count_weight=1.0, seed=seed, most=most)


def adversaries(name):
    """Yield records of all sizes, alone and against each other, the last one to be dropped."""
    x = inputs(name, 9)
    for scale in (0.0, 5e-324, 1e-160, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e76, 1e155, 1e300):
        yield torch.cat([x, x[:1] * scale])
        yield torch.cat([x * scale, x[:1]])
        yield torch.cat([x * scale, -x[:1] * scale])
    for value in (math.nan, math.inf, -math.inf):
        bad = x[:1].clone()
        bad.view(-1)[2] = value
        yield torch.cat([x, bad])
        yield torch.cat([x, bad, x[:1]])
    generator = torch.Generator().manual_seed(5)
    for _ in range(12):
        scales = 10 ** (8 * torch.rand(10, generator=generator, dtype=torch.float64) - 4)
        drawn = inputs(name, 10, seed=int(torch.randint(99, (1,), generator=generator)))
        yield drawn * scales.view(-1, *(1 for _ in drawn.shape[1:]))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_record_moves_the_sum_by_at_most_the_root_of_the_number_of_parts(name, kind):
    model, bound = network(name), moved_by_one(layout_of(network(name), kind), 1.0)
    layout = layout_of(model, kind)
    usual = mean_sizes(model, inputs(name, 16, seed=8), layout, 16)
    worst = 0.0
    for index, x in enumerate(adversaries(name)):
        # Clips far below all sizes, as they are, and far above all.
        clips = [size * (1e-6, 1.0, 1e6)[index % 3] for size in usual]
        apart = sums(model, x, layout, clips) - sums(model, x[:-1], layout, clips)
        assert float(apart.norm()) <= bound * (1 + 1e-6)
        for part in layout.parts:
            assert float(apart[part.slice].norm()) <= 1 + 1e-6
        worst = max(worst, float(apart.norm()) / bound)
    # One position makes rank one, of which the trace is the norm: nothing is given away.
    assert worst > (0.999 if name == "linear" or kind == "diagonal" else 0.7)


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("clip", [1e-320, 1e-250, 1e-170])
def test_clips_below_what_squares_can_hold_bound_a_record_too(name, kind, clip):
    model, layout = network(name), layout_of(network(name), kind)
    # Sizes of 0, squares that vanish in a norm, and ordinary ones.
    for scale in (0.0, 1e-100, 1e-82, 1.0):
        q = sums(model, inputs(name, 1) * scale, layout, [clip] * len(layout.parts))
        assert float(q.norm()) <= moved_by_one(layout, 1.0) * (1 + 1e-6)


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_record_that_is_not_finite_adds_exactly_zero_and_is_not_counted(name, kind, value):
    model = network(name)
    layout, x = layout_of(model, kind), inputs(name, 6)
    clips = [0.1] * len(layout.parts)
    bad = x[:1].clone()
    bad.view(-1)[1] = value
    ids = torch.tensor([0, 1, 9, 2, 3, 4, 5])
    mixed = sums(model, torch.cat([x[:2], bad, x[2:]]), layout, clips, ids, most=7)
    alone = sums(model, bad, layout, clips, torch.tensor([9]))
    assert alone.eq(0).all()
    torch.testing.assert_close(mixed, sums(model, x, layout, clips, most=7), rtol=1e-11, atol=1e-12)
    assert float(mixed[-1]) == 6


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_without_a_clip_the_sum_is_the_mean_over_records_times_their_number(name, kind):
    model, x = network(name), inputs(name, 11)
    layout, clips = layout_of(model, kind), [1e9] * 8
    clips = clips[: len(layout.parts)]
    found = sums(model, x, layout, clips)
    ids = torch.arange(11)

    def errors(logits):
        yield sign_errors(logits.detach().log_softmax(1), record_signs(ids, CLASSES, 3))

    expected = packed_fisher(layout, information(model, [x], errors, kind)) * 11 / 1e9
    torch.testing.assert_close(found[:-1], expected, rtol=1e-8, atol=0)
    assert float(found[-1]) == 11


def test_signs_belong_to_the_record_and_are_fair():
    ids = torch.arange(4000)
    signs = record_signs(ids, 5, seed=7)
    assert signs.abs().eq(1).all()
    assert torch.equal(record_signs(ids[[17, 3]], 5, seed=7), signs[[17, 3]])
    assert not torch.equal(record_signs(ids, 5, seed=8), signs)
    # The mean of n fair signs is beyond 5 / sqrt(n) once in two million.
    assert signs.mean(0).abs().max() < 5 / math.sqrt(4000)
    second = signs.mT @ signs / 4000 - torch.eye(5)
    assert second.abs().max() < 5 / math.sqrt(4000)
    assert (signs[1:] * signs[:-1]).mean().abs() < 5 / math.sqrt(5 * 3999)
    assert (signs * record_signs(ids, 5, seed=8)).mean().abs() < 5 / math.sqrt(5 * 4000)


def test_how_records_are_cut_into_batches_changes_nothing_but_rounding():
    model = network("convolutional")
    layout, x = layout_of(model, "kronecker"), inputs("convolutional", 7)
    clips = mean_sizes(model, x, layout, at_a_time(model, x, layout))
    one, all_of_them = (sums(model, x, layout, clips, most=most) for most in (1, 7))
    torch.testing.assert_close(one, all_of_them, rtol=1e-12, atol=1e-13)


def test_the_model_is_left_as_it_was():
    model = network("convolutional").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layout = layout_of(model, "kronecker")
    sums(model, inputs("convolutional", 3), layout, [1.0] * 6)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("count", [1, 6, 7])
def test_records_go_through_the_model_once_and_are_not_tried_out(count):
    model, seen = network("convolutional"), []
    model[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    x = inputs("convolutional", count)
    sums(model, x, layout_of(model, "kronecker"), [1.0] * 6, most=3)
    records = [row for each in seen for row in each if any(torch.equal(row, own) for own in x)]
    assert torch.equal(torch.stack(records), x)


def test_modules_whose_records_cannot_be_told_apart_are_refused():
    grouped = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(2, 2)).double()
    with pytest.raises(ValueError, match=r"without groups, got '0', Conv2d"):
        check_modules(grouped, layout_of(grouped, "kronecker"))
    norm = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    with pytest.raises(ValueError, match=r"got '1', LayerNorm"):
        check_modules(norm, layout_of(norm, "diagonal"))
    check_modules(norm, layout_of(norm, "kronecker"))  # it has no factors: its mean is taken

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.layer(self.layer(x)))

    twice = Twice().double()
    with pytest.raises(ValueError, match="used more than once"):
        sums(twice, inputs("linear", 2), layout_of(twice, "kronecker"), [1.0] * 4)
