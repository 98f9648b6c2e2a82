"""Microbatches change memory, not the mechanism."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dpkernels.opacus.utils.batch_memory_manager import BatchMemoryManager
from python_tests.opacus.small import BATCH, RECORDS, made, parameters_of, records, train


def managed(largest, *, poisson_sampling=False, noise_multiplier=0.0, zero_first=False):
    model, optimizer, loader = made(
        noise_multiplier=noise_multiplier, poisson_sampling=poisson_sampling
    )
    before = optimizer.zero_grad if zero_first else lambda: None
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=largest, optimizer=optimizer
    ) as split:
        train(model, optimizer, split, epochs=2, before=before)
    return model, optimizer


@pytest.mark.parametrize("largest", [1, 2, 3, BATCH, 100])
@pytest.mark.parametrize("zero_first", [False, True])
def test_parameters_are_those_of_whole_batches(largest, zero_first):
    model, _ = managed(largest, zero_first=zero_first)
    plain, optimizer, loader = made(noise_multiplier=0.0, poisson_sampling=False)
    train(plain, optimizer, loader, epochs=2)
    # 8 steps, each a sum of BATCH terms of at most the bound, in another order.
    rounding = 8 * 2 * BATCH * torch.finfo(torch.float64).eps
    difference = (parameters_of(model) - parameters_of(plain)).abs().max()
    assert difference <= rounding * parameters_of(plain).abs().max()


@pytest.mark.parametrize("poisson_sampling", [False, True])
def test_there_is_one_step_for_each_batch(poisson_sampling):
    _, optimizer = managed(2, poisson_sampling=poisson_sampling, noise_multiplier=1.0)
    steps = 2 * RECORDS // BATCH
    assert optimizer.run.training.steps == steps == optimizer.run.accountant.steps


def test_the_loader_is_as_it_was_afterwards():
    _, optimizer, loader = made(poisson_sampling=False)
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    with manager as split:
        assert [len(x) for x, _ in split] == [2, 2, 1] * (RECORDS // BATCH)
        assert split.dataset is loader.dataset
    assert [len(x) for x, _ in loader] == [BATCH] * (RECORDS // BATCH)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_was_left_keeps_its_size_to_itself(workers):
    own = DataLoader(records(), batch_size=BATCH, num_workers=workers)
    _, optimizer, loader = made(poisson_sampling=False, data_loader=own)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as split:
        microbatches = iter(split)
        assert len(next(microbatches)[0]) == 2
        assert loader.max_physical_batch_size is None
        # The batch has no step, so it comes again, while the first loop's iterator is alive.
        assert [len(x) for x, _ in loader] == [BATCH] * (RECORDS // BATCH)
        assert [len(x) for x, _ in split] == [2, 2, 1] * (RECORDS // BATCH)
    del microbatches
    assert loader.max_physical_batch_size is None


def test_a_batch_that_was_left_comes_again_whole():
    model, optimizer, loader = made(noise_multiplier=0.0, poisson_sampling=False)
    plain, plain_optimizer, plain_loader = made(noise_multiplier=0.0, poisson_sampling=False)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as split:
        for x, y in split:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            break
        train(model, optimizer, split, before=optimizer.zero_grad)
    train(plain, plain_optimizer, plain_loader)
    # The first loop leaves its batch without a step; the second begins with all of it.
    assert optimizer.run.training.steps == RECORDS // BATCH
    rounding = 4 * 2 * BATCH * torch.finfo(torch.float64).eps * parameters_of(plain).abs().max()
    assert (parameters_of(model) - parameters_of(plain)).abs().max() <= rounding


@pytest.mark.parametrize("largest", [0, -1, 2.5])
def test_a_size_that_is_none_is_named(largest):
    _, optimizer, loader = made()
    manager = BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=largest, optimizer=optimizer
    )
    with pytest.raises(ValueError, match="max_physical_batch_size"):
        manager.__enter__()


def test_another_loader_is_refused():
    _, optimizer, _ = made()
    _, _, other = made()
    manager = BatchMemoryManager(data_loader=other, max_physical_batch_size=2, optimizer=optimizer)
    with pytest.raises(ValueError, match="data_loader must be the one"):
        manager.__enter__()
