"""Runs in several real processes: one guarantee, checkpoints that fit together."""

from __future__ import annotations

import pytest
import torch

from dpkernels.ops.noise import UNREACHABLE_MASS
from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.mechanism import Poisson, gaussian_step
from python_tests.engine.distributed.processes import run
from python_tests.run import processes
from python_tests.run.training import RATE, RECORDS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what each scenario returned on each of two ranks, by its name."""
    return run(processes.ALL, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["ddp_resumed", "fsdp_resumed"])
def test_a_resumed_run_ends_like_one_that_was_not_broken_off(ranks, kind):
    for one in ranks:
        found = one[kind]
        assert found["files"] == ["run.pt.rank0", "run.pt.rank1"]
        for whole, resumed in zip(found["whole"], found["resumed"], strict=True):
            assert torch.equal(whole, resumed)
    for first, second in zip(ranks[0][kind]["whole"], ranks[1][kind]["whole"], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["ddp_resumed", "fsdp_resumed"])
def test_several_processes_spend_what_one_would(ranks, kind):
    accountant = make_accountant("rdp")
    accountant.compose(gaussian_step(1.5, Poisson(RATE), unreachable=UNREACHABLE_MASS), 6)
    for one in ranks:
        assert one[kind]["epsilons"] == (accountant.epsilon(1e-5),) * 2


def test_every_record_belongs_to_one_process(ranks):
    first, second = ({i for batch in one["ddp_resumed"]["batches"] for i in batch} for one in ranks)
    assert first and second and not first & second and first | second <= set(range(RECORDS))


def test_the_last_step_that_all_have_is_resumed(ranks):
    assert [one["broken_off_between_files"] for one in ranks] == [4, 4]
    assert [one["broken_off_before_all_have_written"] for one in ranks] == [2, 2]
    assert [one["of_two_attempts"] for one in ranks] == [2, 2]


def test_all_ranks_hear_why_one_cannot_be_saved(ranks):
    for one in ranks:
        assert (
            "on rank 0: save: it cannot be called between" in one["saved_in_the_middle_of_a_step"]
        )


def test_a_sampler_for_one_process_is_refused_in_several(ranks):
    for one in ranks:
        assert "pass rank= and world_size= to the sampler" in one["sampler_of_another_rank"]


def test_microbatches_of_a_sharded_model_are_refused(ranks):
    for one in ranks:
        assert "max_physical_batch_size must be None" in one["microbatches_of_shards"]


def test_a_batch_taken_back_on_one_rank_waits_on_all(ranks):
    errors, same, steps, handed_out = zip(
        *(one["batch_taken_back_on_one_rank"] for one in ranks), strict=True
    )
    assert "does not have all samples" in errors[0] and errors[1]
    assert same == (True, True) and steps == (1, 1) and handed_out == (2, 2)
