"""DDP and process groups: parity with one process, noise that adds up, failures of one rank."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import dpkernels
from dpkernels.engine.clipping import Adaptive
from dpkernels.ops.noise import add_gaussian_noise_
from python_tests.engine.distributed.processes import PARTS, ddp, three_steps
from python_tests.engine.distributed.scenarios import (
    BOUND,
    EXPECTED,
    MODELS,
    SIGMA,
    WIDE,
    bound_of,
)
from python_tests.engine.models import made
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    norm,
    private,
    sample_gradients,
    square,
)

ELEMENTS = WIDE[0] * WIDE[1]
# Five standard deviations of what is estimated from so many normal numbers: of a standard
# deviation, relative to it, and of a correlation.
OF_STD, OF_CORRELATION = 5 / math.sqrt(2 * ELEMENTS), 5 / math.sqrt(ELEMENTS)


def wanted_sum(name, bound=BOUND):
    model, inputs = made(name)
    return clipped_sum(sample_gradients(model, inputs), bound)


def divided(gradients, number):
    return {name: g / number for name, g in gradients.items()}


def relative_error(x, std):
    return abs(float(x.double().std()) / std - 1)


def correlation(x, y):
    return abs(float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]).double())[0, 1]))


@pytest.mark.parametrize("way", ["ddp", "group", "mean"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_clipped_sums_of_all_ranks(ranks, way, name):
    for rank in ranks:
        assert_same(rank["sums"][f"{way} {name}"], divided(wanted_sum(name, bound_of(name)), 3))


def test_a_rank_may_call_the_model_without_samples(ranks):
    for rank in ranks:
        assert_same(rank["empty_call"], divided(wanted_sum("linear"), 3))


def test_gradients_are_the_same_bits_on_all_ranks(ranks):
    first, *others = ranks
    for other in others:
        for way, gradients in first["sums"].items():
            assert all(torch.equal(g, other["sums"][way][n]) for n, g in gradients.items())
        assert all(map(torch.equal, first["noise"], other["noise"]))


def test_three_steps_train_as_one_process_does(ranks):
    model, inputs = made("linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = three_steps(model, inputs, lambda m, x: square(m(*x)).sum().backward())
    untrained, _ = made("linear")
    for rank in ranks:
        assert_same(rank["trained"], wanted)
        # Adam moves by its learning rate at first, so that nothing stays what it was.
        assert all(not torch.equal(rank["trained"][n], p) for n, p in untrained.named_parameters())


def test_noise_of_the_mean_is_sigma_c_over_the_expected_batch(ranks):
    for gradient in ranks[0]["noise"]:
        assert relative_error(gradient, SIGMA * BOUND / EXPECTED) < OF_STD


def test_noise_of_one_process_is_the_same():
    model = torch.nn.Linear(WIDE[1], WIDE[0], bias=False)
    options = {"noise_multiplier": SIGMA, "expected_batch_size": EXPECTED}
    _, optimizer = private(model, BOUND, **options)
    optimizer.step()
    assert relative_error(model.weight.grad, SIGMA * BOUND / EXPECTED) < OF_STD


def test_the_same_seed_on_every_rank_would_show_in_the_variance(ranks):
    off = ranks[0]["noise_of_one_seed"]
    # W equal shares add up to W std / sqrt(W).
    assert relative_error(off, SIGMA * BOUND / EXPECTED * math.sqrt(len(ranks))) < OF_STD
    assert relative_error(off, SIGMA * BOUND / EXPECTED) > OF_STD


def test_noise_of_two_steps_is_not_the_same(ranks):
    first, second, _ = ranks[0]["noise"]
    assert correlation(first, second) < OF_CORRELATION


def test_ranks_draw_independent_shares_of_one_seed(ranks):
    shares = []
    for rank in ranks:
        share = torch.zeros(WIDE)
        add_gaussian_noise_(share, SIGMA * BOUND / math.sqrt(len(ranks)), *rank["keys"])
        shares.append(share)
    for i, one in enumerate(shares):
        assert all(correlation(one, other) < OF_CORRELATION for other in shares[:i])
    torch.testing.assert_close(ranks[0]["noise"][2], sum(shares) / EXPECTED)


def test_what_leaves_a_process_is_one_message_with_its_share_of_noise(ranks):
    for rank in ranks:
        found = rank["sent"]
        assert found["before"] == 0
        (message,) = found["floats"]
        share = message - found["own"]
        assert relative_error(share, SIGMA * BOUND / math.sqrt(len(ranks))) < OF_STD


def test_adaptive_clipping_counts_all_ranks(ranks):
    model, inputs = made("linear")
    norms, bound = [norm(g) for g in sample_gradients(model, inputs)], bound_of("linear")
    within = sum(value <= bound for value in norms) - len(norms) / 2
    rate = Adaptive(bound).rate
    wanted = bound * math.exp(-rate * (within / 3.0 + 0.5 - 0.5))
    # Noise of 1e-9 in the count moves the exponent by so much, ten standard deviations of it.
    moved = 10 * rate * 1e-9 / 3.0
    for rank in ranks:
        assert rank["bounds"][0] == pytest.approx(wanted, rel=moved)


def test_adaptive_bounds_stay_equal_under_noise(ranks):
    assert len({rank["bounds"] for rank in ranks}) == 1


@pytest.mark.parametrize(
    "what",
    [
        "noise_multiplier",
        "expected_batch_size",
        "loss_reduction",
        "max_grad_norm",
        "parameter 0.weight",
        "parameter 1.bias",
        "parameter weight",
    ],
)
def test_ranks_that_disagree_are_refused_on_every_rank(ranks, what):
    for rank in ranks:
        assert f"{what} must be the same on all ranks" in rank["disagreements"][what]


REFUSALS = {
    "listener": "no budget left",
    "closure": "a closure asks for several gradients",
    "scaler": "GradScaler",
    "added parameter": "was added, frozen or unfrozen",
}


@pytest.mark.parametrize("place", REFUSALS)
def test_a_refusal_on_one_rank_is_one_on_all(ranks, place):
    *others, last = [rank["interruptions"][place] for rank in ranks]
    assert REFUSALS[place] in last[0]
    assert all("another rank refused" in error for error, _, _ in others)


def test_a_schedule_of_one_rank_only_is_refused_on_all(ranks):
    assert all("ranks disagree" in rank["interruptions"]["schedule"][0] for rank in ranks)


@pytest.mark.parametrize("place", [*REFUSALS, "schedule", "network", "after the network"])
def test_a_step_that_fails_hands_nothing_out(ranks, place):
    for rank in ranks:
        error, gradients, steps = rank["interruptions"][place]
        assert error
        assert not gradients
        assert steps == 0


def test_a_step_after_failures_holds_its_own_samples_only(ranks):
    for rank in ranks:
        gradients, steps = rank["interruptions"]["after"]
        assert_same(gradients, divided(wanted_sum("linear"), 3))
        assert steps == 1


def test_a_rank_that_failed_while_sums_were_added_up_takes_no_further_step(ranks):
    for rank in ranks:
        assert "connection lost" in rank["interruptions"]["network"][0]
        assert "start all of them again" in rank["interruptions"]["after the network"][0]
        assert "start all of them again" in rank["interruptions"]["message after the network"]


def test_a_seeded_state_is_loaded_by_its_own_rank_only(ranks):
    first, *others = [rank["states"] for rank in ranks]
    assert first == {"seed": "", "entropy": ""}
    for state in others:
        assert "one state for each rank" in state["seed"]
        assert state["entropy"] == ""


def test_detach_gives_ddp_back(ranks):
    for rank in ranks:
        found = rank["detached"]
        mean = {n: sum(r["detached"]["own"][n] for r in ranks) / len(ranks) for n in found["own"]}
        assert_same(found["ddp"], mean)
        assert not found["class"]


def test_join_is_refused(ranks):
    assert all("leave it out" in rank["joined"] for rank in ranks)


def test_a_group_without_this_process_is_refused(ranks):
    first, *others = [rank["outsiders"] for rank in ranks]
    assert first == ""
    assert all("process_group must hold this process" in error for error in others)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_process_sends_nothing(one_process, monkeypatch):
    model, inputs = made("linear")
    model = ddp(model)

    def refuse(*args, **kwargs):
        raise AssertionError("a message of one process")

    for name in ("all_reduce", "all_gather_object", "broadcast"):
        monkeypatch.setattr(dist, name, refuse)
    training, optimizer = private(model, BOUND)
    square(model(*inputs)).sum().backward()
    optimizer.step()
    assert_same({n: p.grad for n, p in model.module.named_parameters()}, wanted_sum("linear"))
    assert (training.rank, training.world_size) == (0, 1)


def test_a_copy_of_ddp_computes_with_weights_of_its_own(one_process):
    model, inputs = made("linear")
    model = ddp(model)
    training, _ = private(model, BOUND)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(*inputs).any() and model(*inputs).any()
    with pytest.raises(RuntimeError, match="copy of one in private training"):
        square(copied(*inputs)).sum().backward()
    assert training.samples == 0
    own, _ = private(copied, BOUND)
    square(copied(*inputs)).sum().backward()
    assert own.samples == len(inputs[0]) and training.samples == 0


def test_ddp_has_a_group_of_its_own(one_process):
    model, _ = made("linear")
    other = dist.new_group([0])
    with pytest.raises(ValueError, match="process_group must be left out"):
        private(ddp(model), BOUND, process_group=other)


def test_ddp_inside_of_a_model_is_refused(one_process):
    model = torch.nn.Sequential(ddp(torch.nn.Linear(3, 3)), torch.nn.Tanh())
    with pytest.raises(dpkernels.Unsupported, match="wrap the whole model"):
        private(model, BOUND)


def test_the_first_fsdp_is_refused(one_process):
    model = FullyShardedDataParallel(torch.nn.Linear(3, 3), device_id=torch.device("cpu"))
    with pytest.raises(dpkernels.Unsupported, match="fully_shard"):
        private(model, BOUND)


def test_parts_of_the_ranks_make_up_the_batch():
    assert all(sum(parts) == 7 and len(parts) == world for world, parts in PARTS.items())
