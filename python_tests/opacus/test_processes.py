"""Several processes train one model together, under the names that Opacus' users know."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import dpkernels
from python_tests.engine.distributed.processes import run
from python_tests.opacus import process_scenarios
from python_tests.opacus.process_scenarios import WRAPPERS
from python_tests.opacus.small import RECORDS, classifier, records

WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(process_scenarios.ALL, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_of_one_process_on_all_samples(ranks, wrapper):
    parts = [rank["without_noise"][wrapper] for rank in ranks]
    assert [part["expected_batch_size"] for part in parts] == [RECORDS * 0.5] * WORLD
    data = records()
    label_of = {tuple(x.tolist()): int(y) for x, y in zip(*data.tensors, strict=True)}
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    dpkernels.make_private(
        model,
        optimizer,
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        expected_batch_size=RECORDS * 0.5,
        loss_reduction="sum",
    )
    steps = list(zip(*(part["seen"] for part in parts), strict=True))
    assert len(steps) == 2
    for batches in steps:
        x = torch.cat(batches)
        y = torch.tensor([label_of[tuple(row.tolist())] for row in x])
        cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    # Two steps, each a sum of at most RECORDS terms, in another order.
    rounding = 2 * 2 * RECORDS * torch.finfo(torch.float64).eps
    for part in parts:
        for ours, wanted in zip(part["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted.detach(), rtol=0, atol=rounding)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_of_all_is_accounted_once_and_leaves_one_model(ranks, wrapper):
    one, other = (rank["with_noise"][wrapper] for rank in ranks)
    assert one["history"] == other["history"] == [(1.0, 0.5, 2)]
    assert one["epsilon"] == other["epsilon"]
    for ours, theirs in zip(one["parameters"], other["parameters"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_process_has_records_of_its_own(ranks, wrapper):
    rows = [
        {tuple(row.tolist()) for batch in rank["with_noise"][wrapper]["seen"] for row in batch}
        for rank in ranks
    ]
    assert not rows[0] & rows[1]


def test_what_one_process_refuses_none_releases(ranks):
    (message, steps), (other, other_steps) = (rank["refused"] for rank in ranks)
    assert "whole batch" in message and other and steps == other_steps == 0


def test_records_that_are_repeated_for_equal_shares_are_refused(ranks):
    assert all("poisson_sampling must be True" in rank["one_order"] for rank in ranks)


def test_records_are_sampled_for_the_processes_of_the_model(ranks):
    assert [rank["a_group_of_one"] for rank in ranks] == [(0, 1, RECORDS, 1)] * WORLD


def test_microbatches_are_refused_where_ranks_must_have_as_many(ranks):
    for rank in ranks:
        error, steps = rank["in_microbatches"].pop("FSDP2")
        assert "as many microbatches" in error and steps == 0
        assert all(found == ("", 2) for found in rank["in_microbatches"].values())


@pytest.mark.parametrize("scenario", ["resumed", "resumed_with_options"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_checkpoint_that_all_processes_write_is_one_of_all(ranks, wrapper, scenario):
    found = [rank[scenario][wrapper] for rank in ranks]
    for one in found:
        sharded = ["x.pt.rank0", "x.pt.rank1"]
        assert one["files"] == (sharded if wrapper == "FSDP2" else ["x.pt"])
        assert all(map(torch.equal, one["loaded"], one["saved"]))
        assert all(map(torch.equal, one["after"], found[0]["after"]))
        assert one["history"] == [(1.0, 0.5, 4)]


def test_shards_are_those_of_the_last_step_that_all_processes_have(ranks):
    for rank in ranks:
        steps, error = rank["cut_short"]
        assert steps == 2
        assert "no checkpoint that all 2 ranks wrote" in error
