"""Gradients of samples can be checked, on inputs that are nobody's data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from dpkernels.opacus.layers import DPLSTM
from dpkernels.opacus.utils import per_sample_gradients_utils
from dpkernels.opacus.utils.packed_sequences import compute_seq_lengths
from dpkernels.opacus.utils.per_sample_gradients_utils import (
    check_per_sample_gradients_are_correct,
    compute_grad_samples_microbatch_and_opacus,
    get_grad_sample_modes,
)


@pytest.mark.parametrize("mode", get_grad_sample_modes(use_ew=True))
@pytest.mark.parametrize(
    ("module", "shape", "batch_first"),
    [
        (nn.Linear(4, 3), (5, 4), True),
        (nn.Linear(4, 3), (2, 5, 4), False),
        (nn.Conv2d(2, 4, 3, groups=2), (3, 2, 6, 7), True),
        (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), (3, 2, 4), True),
        (DPLSTM(4, 3), (2, 5, 4), False),
        (nn.GRU(4, 3, batch_first=True), (5, 2, 4), True),
    ],
)
def test_gradients_of_the_engine_are_those_of_autograd(mode, module, shape, batch_first):
    torch.manual_seed(0)
    x = torch.randn(shape)
    options = {"batch_first": batch_first, "grad_sample_mode": mode}
    assert check_per_sample_gradients_are_correct(x, module, **options)
    wanted, found = compute_grad_samples_microbatch_and_opacus(x, module, **options)
    assert wanted.keys() == found.keys() == dict(module.named_parameters()).keys()
    batch = shape[0 if batch_first else 1]
    assert all(len(gradient) == batch and gradient.any() for gradient in found.values())


@pytest.mark.parametrize("wrong", [lambda g: 2 * g, lambda g: g.flip(0), torch.zeros_like])
def test_gradients_that_are_not_those_of_autograd_are_noticed(monkeypatch, wrong):
    right = per_sample_gradients_utils.compute_opacus_grad_sample

    def changed(*args):
        return {name: wrong(gradient) for name, gradient in right(*args).items()}

    monkeypatch.setattr(per_sample_gradients_utils, "compute_opacus_grad_sample", changed)
    assert not check_per_sample_gradients_are_correct(torch.randn(4, 3), nn.Linear(3, 2))


def test_an_empty_batch_is_refused():
    with pytest.raises(RuntimeError, match="samples"):
        check_per_sample_gradients_are_correct(torch.zeros(0, 4), nn.Linear(4, 3))


def test_lengths_are_counted():
    packed = pack_sequence([torch.zeros(n, 2) for n in (5, 3, 3, 1)])
    assert compute_seq_lengths(packed.batch_sizes) == [5, 3, 3, 1]
