"""A forward pass leaves buffers and frozen parameters alone, the first and every other one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpkernels
from dpkernels.engine import Unsupported
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    median_norm,
    private,
    private_sum,
    sample_gradients,
    square,
)


class Late(nn.Module):
    """Writes to itself only when told to."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.write, self.told = write, False

    def forward(self, x):
        if self.told:
            self.write(self, x.detach())
        return self.frozen(self.layer(x)) - self.mean


WRITES = {
    "buffer in place": lambda m, x: m.mean.mul_(0.9).add_(0.1 * x.mean(0)),
    "buffer replaced": lambda m, x: setattr(m, "mean", x.mean(0)),
    "buffer added": lambda m, x: m.register_buffer("last", x[0].clone()),
    "frozen parameter": lambda m, x: m.frozen.weight.add_(x.mean()),
    "frozen parameter replaced": lambda m, x: setattr(
        m.frozen, "weight", nn.Parameter(x[:4].clone(), requires_grad=False)
    ),
}


@pytest.mark.parametrize("when", ["first call", "later", "without autograd"])
@pytest.mark.parametrize("name", WRITES)
def test_a_forward_pass_that_writes_to_the_model_is_refused(name, when):
    torch.manual_seed(0)
    model = Late(WRITES[name])
    training, _ = private(model, 1.0)
    x = torch.randn(5, 4)
    if when != "first call":
        model(x)
    model.told = True
    with torch.set_grad_enabled(when != "without autograd"):  # noqa: SIM117
        with pytest.raises(Unsupported, match="writes to this tensor"):
            model(x)
    assert training.samples == 0


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_frozen_embedding_with_max_norm_is_refused(kind):
    model = nn.Sequential(kind(9, 4, max_norm=1.0).requires_grad_(False), nn.Linear(4, 3))
    with pytest.raises(Unsupported, match=r"0 \(Embedding.*max_norm"):
        private(model, 1.0)


def batch_norm_model():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(50, 4) * 3 + 1)
    norm.requires_grad_(False).eval()
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 3)).double()


def test_a_frozen_batch_norm_in_eval_mode_mixes_nothing():
    model = batch_norm_model()
    x = torch.randn(5, 4, dtype=torch.float64)
    gradients = sample_gradients(model, (x,))
    bound = median_norm(gradients)
    assert_same(private_sum(model, (x,), bound), clipped_sum(gradients, bound))


def test_a_batch_norm_that_goes_back_to_training_mode_is_refused():
    model = batch_norm_model()
    training, _ = private(model, 1.0)
    x = torch.randn(5, 4, dtype=torch.float64)
    model(x)
    before = model[1].running_mean.clone()
    model.train()
    with pytest.raises(Unsupported, match=r"1 \(BatchNorm1d\) is in training mode"):
        model(x)
    assert torch.equal(model[1].running_mean, before) and training.samples == 0
    model[1].eval()
    square(model(x)).sum().backward()
    assert training.samples == 5


def test_a_batch_norm_without_averages_or_with_trained_weights_is_refused():
    for norm in (nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False).eval()):
        if norm.running_mean is None:
            norm.requires_grad_(False)
        with pytest.raises(Unsupported, match="normalises over the batch"):
            private(nn.Sequential(nn.Linear(4, 4), norm), 1.0)


@pytest.mark.parametrize("how", ["module", "nested module", "parameter", "unfrozen", "added"])
def test_what_joins_the_model_after_make_private_is_refused(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3)))
    model[0].bias.requires_grad_(False)
    training, _ = private(model, 1.0)
    x = torch.randn(5, 4)
    model(x)
    match how:
        case "module":
            model[1] = nn.Linear(4, 3)
        case "nested module":
            model[1][0] = nn.Linear(4, 3)
        case "parameter":
            model[1][0].weight = nn.Parameter(torch.randn(3, 4))
        case "unfrozen":
            model[0].bias.requires_grad_()
        case "added":
            model[1].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(Unsupported, match="make_private again"):
        model(x)
    assert training.samples == 0


def test_model_zero_grad_forgets_microbatches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    gradients = sample_gradients(model, (x[3:],))
    bound = median_norm(gradients)
    training, optimizer = private(model, bound)
    square(model(x[:3])).sum().backward()
    model.zero_grad()
    assert training.samples == 0
    square(model(x[3:])).sum().backward()
    optimizer.step()
    wanted = clipped_sum(gradients, bound)
    assert_same({name: p.grad for name, p in model.named_parameters()}, wanted)
    training.detach()
    assert "zero_grad" not in vars(model)


@pytest.mark.parametrize("made", [lambda: dpkernels.clipping.Adaptive(1.0)])
def test_a_bound_that_changes_between_backward_and_step_is_refused(made):
    model = nn.Linear(4, 3)
    clipping = made()
    training, optimizer = private(model, clipping, noise_multiplier=1.0)
    x = torch.randn(5, 4)
    square(model(x)).sum().backward()
    clipping.max_norm = 0.1
    before, counter = model.weight.detach().clone(), training.noise_key.counter
    with pytest.raises(RuntimeError, match="max_norm was changed"):
        optimizer.step()
    assert torch.equal(model.weight, before) and training.noise_key.counter == counter
    # Nothing is left of the step; between steps the bound may change.
    square(model(x)).sum().backward()
    clipping.max_norm = 0.2
    with pytest.raises(RuntimeError, match="max_norm was changed"):
        square(model(x)).sum().backward()
    square(model(x)).sum().backward()
    optimizer.step()
    assert training.steps == 1


class Doubled(nn.Conv2d):
    """Another function than its class, by the method that ``forward`` calls."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


def test_subclasses_compute_in_training_what_they_compute_otherwise():
    torch.manual_seed(0)
    model = nn.Sequential(Doubled(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    gradients = sample_gradients(model, (x,))
    bound = median_norm(gradients)
    assert_same(private_sum(model, (x,), bound), clipped_sum(gradients, bound))
