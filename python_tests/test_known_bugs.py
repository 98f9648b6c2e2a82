"""Bugs that libraries for private training have had: each is planted, and a property notices it.

A property is a function that asserts something of a result; a bug is a patch of ours that makes the
engine do what another one did. The property holds as things are, and fails with the bug.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpkernels
from dpkernels.engine import clipping, distributed, step, sums
from dpkernels.engine.layers.conv import ConvLayer
from dpkernels.engine.layers.layer import WeightAndBias
from dpkernels.engine.layers.linear import LinearLayer
from dpkernels.engine.layers.tied import TiedGroup
from dpkernels.ops import clip
from dpkernels.ops.noise import add_gaussian_noise_
from dpkernels.privacy import (
    Poisson,
    calibrate_noise_multiplier,
    calibration,
    gaussian_step,
    make_accountant,
)
from dpkernels.privacy.gaussian import gaussian_epsilon
from dpkernels.privacy.samplers import ShuffledSampler
from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun
from python_tests.engine.oracle import (
    gradients_of,
    norm,
    private,
    private_sum,
    sample_gradients,
    square,
)

# What rounding may add to a norm, as the contract has it.
SLACK = 1 + 1e-6


def seeded(seed=1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpkernels.NoiseKey.from_seed(seed)


def linear(*sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
    return nn.Sequential(*layers).double()


def assert_within_bound(model, sample):
    """One sample alone moves the sum by no more than the bound, a quarter of its gradient."""
    bound = norm(sample_gradients(model, sample)[0]) / 4
    assert norm(private_sum(model, sample, bound)) <= bound * SLACK


def divided_by_a_public_number():
    model, x = linear(4, 3), torch.randn(5, 4, dtype=torch.float64)
    alone = private_sum(model, (x[:1],), 0.5, expected_batch_size=8)
    # Four more samples whose gradient is zero: nothing of the sum is to be seen of them.
    flat = copy.deepcopy(model)
    _, optimizer = private(flat, 0.5, expected_batch_size=8)
    (square(flat(x)) * torch.tensor([1.0, 0, 0, 0, 0])).sum().backward()
    optimizer.step()
    for name, gradient in gradients_of(flat).items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-12, atol=0)


def division_by_the_realised_batch_size(patch):
    plain = step.Step.noisy_gradient

    def divided(self, check):
        public = self.mechanism
        self.mechanism = dataclasses.replace(public, expected_batch_size=self.seen.samples)
        plain(self, check)
        self.mechanism = public

    patch.setattr(step.Step, "noisy_gradient", divided)


def ghost_norms_clip():
    assert_within_bound(linear(6, 5, 4), (10 * torch.randn(1, 6, dtype=torch.float64),))


def clip_norm_ignored(patch):
    patch.setattr(
        clipping.Flat,
        "factors",
        lambda self, norms, dtype: torch.full_like(norms.sq_norms[0], norms.scale, dtype=dtype),
    )


def bias_of_many_positions_counts():
    # Errors of all positions point the same way, and inputs are small: the bias has the norm.
    x = 1e-3 * torch.ones(1, 16, 4, dtype=torch.float64)
    assert_within_bound(linear(4, 3), (x,))


def bias_norm_position_by_position(patch):
    plain = LinearLayer.norms

    def wrong(self, captured, sides):
        _, d = captured
        found = plain(self, captured, sides)
        right = d.flatten(1, -2).sum(1).square().sum(1)
        each = d.square().flatten(1).sum(1)
        return SimpleNamespace(sq_norms=found.sq_norms - right + each, add_to=found.add_to)

    patch.setattr(LinearLayer, "norms", wrong)


def earlier_gradients_stay():
    model = linear(4, 3)
    _, optimizer = private(model, 0.5)
    kept = []
    for k in range(2):
        square(model(torch.full((2, 4), k + 1.0, dtype=torch.float64))).sum().backward()
        optimizer.step()
        kept.append([p.grad for p in model.parameters()])
        kept.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(kept[0], kept[1], strict=True))


def buffers_aliased_across_steps(patch):
    kept = {}

    def allocate(self, piece):
        flat = kept.setdefault(piece, torch.empty(piece.elements, dtype=piece.dtype))
        self._flat[piece] = flat
        parts = flat.split([p.numel() for p in piece.parameters])
        for parameter, part in zip(piece.parameters, parts, strict=True):
            self._views[parameter] = part.view(parameter.shape)

    patch.setattr(sums.Sums, "_allocate", allocate)


def noise_once_a_step():
    model = nn.Linear(300, 400, bias=False)
    _, optimizer = private(model, 1e-6, noise_multiplier=2.0, noise_key=seeded())
    for _ in range(4):
        square(model(torch.zeros(3, 300))).sum().backward()
    optimizer.step()
    # 120,000 draws: the deviation is within 5 / sqrt(2 n) of the true one.
    n = model.weight.numel()
    assert float(model.weight.grad.std()) == pytest.approx(2e-6, rel=5 / math.sqrt(2 * n))


def noise_once_a_microbatch(patch):
    plain = step.Step.pass_complete

    def noisy(self, current):
        plain(self, current)
        std = self.mechanism.noise_multiplier * self.clipping.sensitivity(self.names)
        for buffer in self._sums._flat.values():
            add_gaussian_noise_(buffer, std, self.key)

    patch.setattr(step.Step, "pass_complete", noisy)


def noise_of_layers_clipped_apart():
    model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(4)))
    bounds = clipping.PerLayer({str(k): 3.0 for k in range(4)})
    _, optimizer = private(model, bounds, noise_multiplier=1.0, noise_key=seeded())
    optimizer.step()
    noise = torch.cat([p.grad.flatten() for p in model.parameters()])
    moved = math.sqrt(4 * 3.0**2)
    assert float(noise.std()) == pytest.approx(moved, rel=5 / math.sqrt(2 * noise.numel()))


def noise_of_flat_clipping_for_layers(patch):
    patch.setattr(clipping.PerLayer, "sensitivity", lambda self, layers: self.bounds(layers)[0])


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x):
        return self.out(self.tokens(x))


def tied_weights_count_together():
    model = Tied().double()
    with torch.no_grad():
        model.tokens.weight.mul_(3)
    assert_within_bound(model, (torch.tensor([[1, 2, 1, 1]]),))


def tied_norms_overwrite_each_other(patch):
    plain = TiedGroup._weight_norms

    def last(self, used, tokens):
        found = plain(self, used, tokens)
        return dataclasses.replace(found, sq_norms=found.embedding.sq_norms)

    patch.setattr(TiedGroup, "_weight_norms", last)


def groups_of_channels_are_apart():
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3, groups=2, bias=False).double()
    assert_within_bound(model, (20 * torch.randn(1, 4, 5, 5, dtype=torch.float64),))


def groups_summed_over_the_wrong_axis(patch):
    def wrong(self, captured, sides):
        (gradients,) = self.stored(captured, sides)
        found = plain(self, captured, sides)
        # [B, O, I/G, k, k], added up over the outputs of a group before it is squared.
        batch, groups = gradients.shape[0], self.module.groups
        mixed = gradients.view(batch, groups, -1, gradients[0, 0].numel()).mean(2)
        return SimpleNamespace(sq_norms=mixed.square().flatten(1).sum(1), add_to=found.add_to)

    plain = ConvLayer.norms
    patch.setattr(ConvLayer, "norms", wrong)


def noise_is_wider_than_the_parameters():
    model = nn.Linear(30, 40, bias=False).bfloat16()
    _, optimizer = private(model, 1.0, noise_multiplier=1.0, noise_key=seeded(5))
    optimizer.step()
    wide = torch.zeros(40 * 30)
    add_gaussian_noise_(wide, 1.0, seeded(5))
    assert torch.equal(model.weight.grad, wide.view(40, 30).bfloat16())
    # Box-Muller in 16 bits has few values; rounded from float32 nearly all of bfloat16's are hit.
    assert model.weight.grad.unique().numel() > 500


def noise_in_half_precision(patch):
    def halved(buffer, std, key, scale=1.0):
        noise = torch.zeros_like(buffer)
        add_gaussian_noise_(noise, 1.0, key)
        noise = (noise * 16).round() / 16  # as few values as a narrow generator has
        buffer.copy_(((buffer.bfloat16() + std * noise.bfloat16()) * scale).to(buffer.dtype))

    patch.setattr(distributed, "add_gaussian_noise_", halved)


def bad_samples_are_dropped():
    model = linear(4, 3)
    x = torch.randn(3, 4, dtype=torch.float64)
    wanted = private_sum(model, (x[[0, 2]],), 0.5)
    for bad in (math.nan, math.inf):
        x[1] = bad
        got = private_sum(model, (x,), 0.5)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def nan_survives_the_clip(patch):
    def factors(sq_norms, max_norm, *, scale, dtype):
        total = torch.stack(sq_norms).sum(0).sqrt() * scale
        return (max_norm / total).clamp(max=1).to(dtype) * scale

    patch.setattr(clip, "layer_factors", factors)
    plain = WeightAndBias.add_to

    def add_to(self, buffers, factors, accumulate):
        # A product takes what a factor of 0 would leave out.
        plain(self, buffers, torch.where(factors == 0, math.nan, factors), accumulate)

    patch.setattr(WeightAndBias, "add_to", add_to)


def a_checkpoint_knows_what_noise_was_used():
    model = linear(4, 3)
    training, optimizer = private(model, 1.0, noise_multiplier=1.0, noise_key=seeded())
    optimizer.step()
    first = gradients_of(model)
    state = training.state_dict()
    training.detach()
    training, optimizer = private(model, 1.0, noise_multiplier=1.0, noise_key=seeded())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.load_state_dict(state)
    optimizer.step()
    second = gradients_of(model)
    assert not any(torch.equal(first[name], second[name]) for name in first)


def state_without_the_noise_counter(patch):
    plain = dpkernels.NoiseKey.state_dict
    patch.setattr(dpkernels.NoiseKey, "state_dict", lambda self: plain(self) | {"counter": 0})


def shuffled_run():
    """Return the epsilon of an epoch of shuffled batches, without noise to spare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = ShuffledSampler(40, 4, seed=1)
        training, optimizer = private(nn.Linear(3, 2), 1.0, noise_multiplier=2.0)
    loader = PrivateLoader(TensorDataset(torch.randn(40, 3)), sampler)
    run = PrivateRun(training, loader, accountant="pld")
    for (x,) in loader:
        square(training.model(x)).sum().backward()
        optimizer.step()
    return run.epsilon(1e-5)


def shuffling_has_no_amplification():
    # Another record in one's place moves one of the steps by 2 C.
    assert shuffled_run() >= gaussian_epsilon(1e-5, 2 / 2.0)


def shuffling_accounted_as_poisson(patch):
    patch.setattr(PrivateLoader, "sampling", Poisson(0.1))


def noise_that_was_searched_for_is_enough():
    for epsilon in (0.3, 1.0, 3.0, 8.0):
        for accountant in ("rdp", "pld"):
            sampling = Poisson(0.02)
            sigma = calibrate_noise_multiplier(epsilon, 1e-5, 200, sampling, accountant=accountant)
            spent = make_accountant(accountant)
            spent.compose(gaussian_step(sigma, sampling), 200)
            assert spent.epsilon(1e-5) <= epsilon


def search_overshoots(patch):
    plain = calibration._narrow
    patch.setattr(calibration, "_narrow", lambda *args: plain(*args) / (1 + calibration._TOLERANCE))


def rank(index, size=2):
    """Return one of several processes, as far as noise is concerned."""
    one = distributed.Ranks()
    one._group, one.rank, one.size = object(), index, size
    return one


def ranks_have_keys_of_their_own():
    assert rank(0).own_key(seeded()).key != rank(1).own_key(seeded()).key


def same_seed_on_every_rank(patch):
    patch.setattr(distributed.Ranks, "own_key", lambda self, key: key)


def shares_add_up_to_the_noise():
    total = torch.zeros(120_000)
    with pytest.MonkeyPatch.context() as patch:
        sent = SimpleNamespace(wait=lambda: None)
        patch.setattr(distributed.dist, "all_reduce", lambda *args, **options: sent)
        for index in range(4):
            part = torch.zeros_like(total)
            rank(index, 4).noisy_sum_([part], 2.0, rank(index, 4).own_key(seeded()))
            total += part
    assert float(total.std()) == pytest.approx(2.0, rel=5 / math.sqrt(2 * total.numel()))


def noise_once_a_rank(patch):
    plain = distributed.add_gaussian_noise_
    patch.setattr(
        distributed, "add_gaussian_noise_", lambda x, std, key, **kw: plain(x, 2 * std, key, **kw)
    )


BUGS = {
    division_by_the_realised_batch_size: divided_by_a_public_number,
    clip_norm_ignored: ghost_norms_clip,
    bias_norm_position_by_position: bias_of_many_positions_counts,
    buffers_aliased_across_steps: earlier_gradients_stay,
    noise_once_a_microbatch: noise_once_a_step,
    noise_of_flat_clipping_for_layers: noise_of_layers_clipped_apart,
    tied_norms_overwrite_each_other: tied_weights_count_together,
    groups_summed_over_the_wrong_axis: groups_of_channels_are_apart,
    noise_in_half_precision: noise_is_wider_than_the_parameters,
    nan_survives_the_clip: bad_samples_are_dropped,
    shuffling_accounted_as_poisson: shuffling_has_no_amplification,
    search_overshoots: noise_that_was_searched_for_is_enough,
    noise_once_a_rank: shares_add_up_to_the_noise,
    same_seed_on_every_rank: ranks_have_keys_of_their_own,
    state_without_the_noise_counter: a_checkpoint_knows_what_noise_was_used,
}


@pytest.mark.parametrize("holds", BUGS.values(), ids=lambda f: f.__name__)
def test_the_property_holds(holds):
    holds()


@pytest.mark.parametrize("bug", BUGS, ids=lambda f: f.__name__)
def test_the_property_fails_with_the_bug(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        BUGS[bug]()
