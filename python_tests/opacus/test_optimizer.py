"""What holds of any torch optimizer holds of the private one, but that it has no copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

from dpkernels.opacus.optimizers import DPOptimizer
from dpkernels.opacus.utils.batch_memory_manager import BatchMemoryManager
from python_tests.opacus.small import RECORDS, made, made_of_halves, train


def test_hooks_of_steps_are_called_in_those_that_are_taken():
    model, optimizer, loader = made(poisson_sampling=False)
    before, after = [], []
    optimizer.register_step_pre_hook(lambda inner, *_: before.append(inner.param_groups))
    handle = optimizer.register_step_post_hook(lambda *_: after.append(optimizer.run.loader))
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    with manager as split:
        train(model, optimizer, split)
    assert len(before) == len(after) == len(loader) == optimizer.run.training.steps
    assert all(groups is optimizer.param_groups for groups in before)
    handle.remove()
    train(model, optimizer, loader)
    assert len(before) == 2 * len(loader) and len(after) == len(loader)


def test_a_hook_before_the_update_sees_the_noisy_gradient():
    model, optimizer, loader = made(noise_multiplier=1e6)
    norms = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(optimizer.params[0].grad.norm()))
    train(model, optimizer, loader)
    # Without noise a gradient's norm is at most RECORDS times the bound, 0.3.
    assert len(norms) == len(loader) and min(norms) > 10 * RECORDS * 0.3


def test_hooks_of_states_are_called():
    _, optimizer, _ = made()
    called = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", "after saving", "before loading", "after loading"]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_is_refused_and_leaves_the_class_alone(copied):
    model, optimizer, loader = made_of_halves()
    step = DPOptimizer.step
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copied(optimizer)
    assert DPOptimizer.step is step
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert optimizer.run.training.steps == 1 and torch.isfinite(model(x)).all()
