"""FSDP2: parity with one process, noise once for each element, gradients that are shards."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from python_tests.engine.distributed.processes import three_steps
from python_tests.engine.distributed.scenarios import BOUND, EXPECTED, SIGMA, WIDE, bound_of
from python_tests.engine.distributed.sharded_scenarios import SHARDED, token
from python_tests.engine.models import made
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    sample_gradients,
    square,
)

ELEMENTS = WIDE[0] * WIDE[1]


@pytest.mark.parametrize("name", [*SHARDED, "token", "two copies"])
def test_gradients_are_the_clipped_sums_of_all_ranks(ranks, name):
    if name == "two copies" and len(ranks) < 4:
        pytest.skip("two copies of two shards need four processes")
    model, inputs = token() if name == "token" else made(name if name in SHARDED else "linear")
    bound = BOUND if name == "token" else bound_of(name if name in SHARDED else "linear")
    wanted = clipped_sum(sample_gradients(model, inputs), bound)
    for rank in ranks:
        found = rank["sharded_sums"][name]
        assert_same(found["gradients"], {n: g / 3 for n, g in wanted.items()})
        assert found["as parameters"]
        assert not found["before"]


def test_three_steps_train_as_one_process_does(ranks):
    model, inputs = made("linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = three_steps(model, inputs, lambda m, x: square(m(*x)).sum().backward())
    for rank in ranks:
        assert_same(rank["sharded_training"], wanted)


def test_every_element_has_noise_once(ranks):
    first, second = ranks[0]["sharded_noise"]
    std = SIGMA * BOUND / EXPECTED
    for gradient in (first, second):
        # Five standard deviations of the estimate: of all, and of the first rank's shard alone.
        for part in (gradient, gradient.chunk(len(ranks))[0]):
            error = abs(float(part.double().std()) / std - 1)
            assert error < 5 / math.sqrt(2 * part.numel())
    both = torch.stack([first.flatten(), second.flatten()]).double()
    assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / math.sqrt(ELEMENTS)


def test_sums_of_half_precision_layers_are_float32(ranks):
    for rank in ranks:
        sharded, alone = rank["half_precision"]
        for name, gradient in sharded.items():
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient.bfloat16(), alone[name])
        wide = torch.cat([g.flatten() for g in sharded.values()])
        assert not torch.equal(wide.bfloat16().float(), wide)


def test_a_weight_that_is_used_outside_of_its_layer_is_refused(ranks):
    for rank in ranks:
        assert "outside of its layer's forward pass" in rank["sharded_refusals"]["reached"]


def test_other_dtensors_are_refused(ranks):
    for rank in ranks:
        assert "not tensor parallelism" in rank["sharded_refusals"]["not fully_shard"]


def test_parameters_beside_sharded_children_are_refused(ranks):
    for rank in ranks:
        assert "a small module of their own" in rank["sharded_refusals"]["own parameters"]


def test_detach_gives_fsdp_back(ranks):
    model, inputs = made("linear")
    square(model(*inputs)).sum().backward()
    for rank in ranks:
        assert_same(rank["sharded_detached"], {n: p.grad for n, p in model.named_parameters()})
