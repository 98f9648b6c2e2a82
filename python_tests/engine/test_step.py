"""One logical step: microbatches, noise once, any optimizer, checkpoints."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpkernels
from dpkernels.ops.noise import add_gaussian_noise_
from python_tests.engine.models import made
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    private,
    private_sum,
    sample_gradients,
    square,
)


def seeded(seed=1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpkernels.NoiseKey.from_seed(seed)


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5), (2, 0, 5)])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_microbatches_add_up(sizes, reduction):
    model, inputs = made("layer norm")
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    _, optimizer = private(model, bound, loss_reduction=reduction)
    for part in inputs[0].split(sizes):
        losses = square(model(part))
        # A mean of nothing is not a number, and a sum of nothing is no reason to skip backward().
        (losses.mean() if reduction == "mean" and len(part) else losses.sum()).backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [8, 9, 20])
def test_many_microbatches_add_up_in_either_dtype(count, dtype):
    # Past 8 microbatches sums go to float64, which must not be the buffer that is written again.
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).to(dtype), torch.randn(count, 4, dtype=dtype)
    gradients = sample_gradients(model, (x,))
    bound = median_norm(gradients)
    _, optimizer = private(model, bound, loss_reduction="sum")
    for part in x.split(1):
        square(model(part)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


def test_noise_comes_once_a_logical_step_and_is_divided_by_the_expected_size():
    model, inputs = made("linear 3-D")
    gradients = sample_gradients(model, inputs)
    bound, sigma, expected = median_norm(gradients), 1.3, 10.0
    training, optimizer = private(
        model, bound, noise_multiplier=sigma, expected_batch_size=expected, noise_key=seeded()
    )
    for part in inputs[0].split(3):
        square(model(part)).sum().backward()
    optimizer.step()
    total = clipped_sum(gradients, bound)
    flat = torch.cat([g.flatten() for g in total.values()])
    add_gaussian_noise_(flat, sigma * bound, seeded(), scale=1 / expected)
    got = torch.cat([g.flatten() for g in gradients_of(model).values()])
    torch.testing.assert_close(got, flat)
    assert training.steps == 1 and training.noise_key.counter == 1


def test_a_step_without_samples_is_a_step_of_noise():
    torch.manual_seed(0)
    model = nn.Linear(200, 100)
    _, optimizer = private(model, 0.5, noise_multiplier=2.0, expected_batch_size=4.0)
    optimizer.step()
    values = torch.cat([g.flatten() for g in gradients_of(model).values()]).double()
    # 20,100 draws of N(0, 1/4^2): the mean has a deviation of 0.0018, the root mean square 0.0013.
    assert abs(float(values.mean())) < 5 * 0.25 / math.sqrt(20_100)
    assert abs(float(values.square().mean().sqrt()) - 0.25) < 5 * 0.25 / math.sqrt(2 * 20_100)


def test_an_empty_batch_goes_through_the_model():
    model, _ = made("layer norm")
    training, optimizer = private(model, 1.0, noise_multiplier=1.0)
    square(model(torch.zeros(0, 4, 5, dtype=torch.float64))).sum().backward()
    optimizer.step()
    assert training.steps == 1
    assert all(g.abs().min() > 0 for g in gradients_of(model).values())


def test_sums_without_noise_are_not_handed_out():
    model, inputs = made("linear")
    _, optimizer = private(model, 1.0, noise_multiplier=1.0)
    for _ in range(2):
        square(model(*inputs)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())


def _step_of_one(model, inputs, optimizer):
    square(model(*inputs)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "keep", [lambda g: g, torch.Tensor.detach, lambda g: g[0], torch.Tensor.numpy]
)
def test_gradients_that_somebody_kept_do_not_change(keep):
    model, inputs = made("linear")
    _, optimizer = private(model, 1.0, noise_multiplier=1.0)
    _step_of_one(model, inputs, optimizer)
    kept = keep(next(model.parameters()).grad)
    before = copy.deepcopy(kept)
    for _ in range(2):
        optimizer.zero_grad()
        _step_of_one(model, inputs, optimizer)
    assert (kept == before).all()


def test_zero_grad_drops_microbatches():
    model, inputs = made("linear")
    wanted = private_sum(model, inputs, 1.0)
    _, optimizer = private(model, 1.0)
    square(model(inputs[0] + 1)).sum().backward()
    optimizer.zero_grad()
    square(model(*inputs)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), wanted)


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
    ],
)
def test_optimizers_and_schedulers_take_the_gradient_as_theirs(kind):
    model, inputs = made("linear")
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = kind(model.parameters(), 0.1), kind(plain.parameters(), 0.1)
    with pytest.warns(UserWarning, match="not private"):
        dpkernels.make_private(
            model,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=0.3,
            expected_batch_size=7,
            loss_reduction="mean",
        )
    both = (optimizer, plain_optimizer)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in both]
    for _ in range(3):
        total = clipped_sum(sample_gradients(plain, inputs), 0.3)
        for name, parameter in plain.named_parameters():
            parameter.grad = total[name] / 7
        plain_optimizer.step()
        optimizer.zero_grad()
        square(model(*inputs)).mean().backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_sample_that_is_not_finite_contributes_nothing_and_is_counted():
    model, (x,) = made("conv2d")
    bad = x.clone()
    bad[2, 0, 0, 0] = torch.nan
    bad[5, 1] = torch.inf
    kept = torch.tensor([0, 1, 3, 4, 6])
    wanted = private_sum(model, (x[kept],), 0.1)
    training, optimizer = private(model, 0.1)
    square(model(bad)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), wanted)
    assert training.nonfinite_samples == 2
    for _ in range(100):
        square(model(bad)).sum().backward()
    assert training.nonfinite_samples == 202 and training.nonfinite_samples == 202


@pytest.mark.parametrize("batch", [3, 4, 256])
def test_a_sample_without_a_gradient_leaves_automatic_clipping_finite(batch):
    model = nn.Linear(3, 2)
    x = torch.randn(batch, 3)
    x[0] = 0
    _, optimizer = private(
        model, dpkernels.clipping.Automatic(1.0, gamma=0.0), loss_reduction="mean"
    )
    (model(x) * x[:, :1]).sum(1).mean().backward()
    optimizer.step()
    gradients = gradients_of(model)
    assert all(g.isfinite().all() for g in gradients.values())
    assert gradients["weight"].norm() > 0


def test_gradient_checkpointing_changes_nothing():
    model, inputs = made("layer norm")
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    _, optimizer = private(model, bound)

    class Checkpointed(nn.Module):
        def forward(self, x):
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    outer = Checkpointed()
    square(outer(*inputs)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


def test_reentrant_checkpointing_is_refused():
    model, inputs = made("layer norm")
    private(model, 1.0)
    x = inputs[0].requires_grad_()
    output = checkpoint(model[1:], checkpoint(model[0], x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        square(output).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_clips_what_autocast_computes(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    x = torch.randn(6, 1, 6, 6)
    with torch.autocast("cpu", dtype):
        gradients = sample_gradients(model, (x,))
        bound = 0.7 * median_norm(gradients)
        got = private_sum(model, (x,), bound)
    assert all(g.dtype == torch.float32 for g in got.values())
    wanted = clipped_sum(gradients, bound)
    for name, g in wanted.items():
        # Both round activations and errors to the half type once in each layer, at other places.
        allowed = 8 * torch.finfo(dtype).eps * float(max(x.abs().max() for x in wanted.values()))
        assert float((got[name] - g).abs().max()) <= allowed, name


def test_the_scale_of_the_loss_is_taken_out():
    model, inputs = made("linear")
    wanted = private_sum(model, inputs, 0.2)
    scaled = private_sum(
        model, inputs, 0.2, loss=lambda output: 1024 * square(output), loss_scale=1024.0
    )
    assert_same(scaled, wanted)


def test_a_checkpoint_restores_the_stream_of_a_seeded_key():
    model, _ = made("linear")
    training, optimizer = private(model, 1.0, noise_multiplier=1.0, noise_key=seeded())
    optimizer.step()
    state = training.state_dict()
    optimizer.step()
    wanted = gradients_of(model)
    other, _ = made("linear")
    resumed, again = private(other, 1.0, noise_multiplier=1.0, noise_key=seeded(99))
    with pytest.warns(UserWarning, match="fixed seed"):
        resumed.load_state_dict(state)
    again.step()
    assert resumed.steps == 2
    assert all(torch.equal(a, wanted[n]) for n, a in gradients_of(other).items())


@pytest.mark.parametrize("bound", [100, 0.25])
def test_a_checkpoint_restores_the_bound_of_adaptive_clipping(bound):
    model, inputs = made("linear")
    training, optimizer = private(model, dpkernels.clipping.Adaptive(bound))
    state = training.state_dict()
    resumed, _ = private(made("linear")[0], dpkernels.clipping.Adaptive(1.0))
    resumed.load_state_dict(state)
    assert resumed.sensitivity == bound
    square(model(*inputs)).sum().backward()
    optimizer.step()
    resumed.load_state_dict(training.state_dict())
    assert resumed.sensitivity == training.sensitivity != bound


@pytest.mark.parametrize("bias", [False, True])
def test_a_backward_pass_inside_of_autocast_is_not_rounded(bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Tanh())
    x = torch.randn(4, 32, 8)
    results = []
    for inside in (False, True):
        twin = copy.deepcopy(model)
        _, optimizer = private(twin, 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(twin(x)).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        results.append(gradients_of(twin))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("name", ["repeated", "tied", "tied linears"])
def test_repeated_and_shared_layers_take_an_empty_batch(name):
    model, (x,) = made(name)
    training, optimizer = private(model, 1.0, noise_multiplier=1.0)
    square(model(x[:0])).sum().backward()
    optimizer.step()
    assert training.steps == 1


def test_the_report_names_rule_formula_and_cost():
    model, inputs = made("layer norm")
    model[0].weight.requires_grad_(False)
    training, _ = private(model, 1.0)
    assert all(layer.formula is None for layer in training.report().layers)
    square(model(*inputs)).sum().backward()
    first, norm, last = training.report().layers
    assert (first.rule, first.formula) == ("linear", "stored")
    assert (norm.name, norm.rule, norm.parameters) == ("1", "scale and shift", 12)
    assert last.flops > 0 and last.bytes > 0 and last.reason
    assert training.report().unpreconditioned == ("0", "1", "2")
    text = str(training.report())
    assert "not seen yet" not in text and "noise multiplier 0" in text
