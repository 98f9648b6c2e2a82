"""A scale for every element goes onto gradients before the clip, whatever the layer."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from dpkernels import clipping
from dpkernels.engine.capture import flattened
from dpkernels.engine.layers import scaled
from dpkernels.engine.rules import layers_of
from dpkernels.ops.factor import Diagonal
from dpkernels.ops.noise import NoiseKey
from dpkernels.precondition import FixedSides, Scale, Sides
from python_tests.engine.models import CASES, made
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    norm,
    private,
    private_sum,
    sample_gradients,
    square,
)
from python_tests.engine.test_transposed_linear import Conv1D


class Attention(nn.Module):
    """Self-attention, whose one product serves queries, keys and values, or three inputs."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)
        self.apart = apart

    def forward(self, x):
        """Return ``[B, T, 6]``."""
        keys = x.roll(1, 1) if self.apart else x
        return self.attention(x, keys, keys, need_weights=False)[0]


class Own(nn.Module):
    """Parameters of the module's own: a matrix, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 4))
        self.number = nn.Parameter(torch.tensor(0.3))
        self.after = nn.Linear(4, 3)

    def forward(self, x):
        """Return ``[B, 3]``."""
        return self.after(torch.tanh(x @ self.matrix * self.number))


class Recurrent(nn.Module):
    """Two layers, both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        """Return ``[B, T, 6]``."""
        return self.lstm(x)[0]


MORE = {
    "attention": (lambda: Attention(False), (5, 6)),
    "attention of two inputs": (lambda: Attention(True), (5, 6)),
    "own parameters": (Own, (5,)),
    "lstm": (Recurrent, (3, 4)),
    "transposed linear": (lambda: nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(3, 6)), (3, 4)),
    "one position of many axes": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), (1, 1, 4)),
    "wide": (lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20)), (2, 20)),
}
UNTIED = [name for name in CASES if "tied" not in name]


def case(name, samples=7):
    if name in CASES:
        return made(name, samples)
    torch.manual_seed(0)
    make, shape = MORE[name]
    return make().double(), (torch.randn(samples, *shape, dtype=torch.float64),)


def scales_of(model):
    """Return a scale for every trained layer, and the same by the name of the parameter."""
    generator = torch.Generator().manual_seed(1)
    names = {p: name for name, p in model.named_parameters()}
    sides, by_name = {}, {}
    for layer in flattened(layers_of(model)):
        values = {}
        for attribute, p in layer.parameters.items():
            exponents = torch.rand(p.shape, generator=generator, dtype=torch.float64) * 4 - 2
            values[attribute] = by_name[names[p]] = (10**exponents).to(p.dtype)
        sides[layer.name] = Sides(scale=Scale(values))
    return FixedSides(sides), by_name


def scaled_gradients(model, inputs, scales):
    return [{k: scales[k] * g for k, g in one.items()} for one in sample_gradients(model, inputs)]


@pytest.mark.parametrize("name", [*UNTIED, *MORE])
def test_clipped_sums_are_those_of_scaled_single_samples(name):
    model, inputs = case(name)
    preconditioner, scales = scales_of(model)
    gradients = scaled_gradients(model, inputs, scales)
    bound = median_norm(gradients)
    actual = private_sum(model, inputs, bound, preconditioner=preconditioner)
    assert_same(actual, clipped_sum(gradients, bound))


@pytest.mark.parametrize("name", ["linear", "conv2d", "wide", "embedding", "layer norm"])
@pytest.mark.parametrize("mode", ["mean", "automatic", "per layer"])
def test_so_they_are_for_averaged_losses_and_other_clipping(name, mode):
    model, inputs = case(name)
    preconditioner, scales = scales_of(model)
    gradients = scaled_gradients(model, inputs, scales)
    bound = median_norm(gradients)
    if mode == "mean":
        actual = private_sum(model, inputs, bound, preconditioner=preconditioner, reduction="mean")
        assert_same(actual, clipped_sum(gradients, bound))
        return
    if mode == "automatic":
        made = clipping.Automatic(bound, gamma=0.5)
        factors = [dict.fromkeys(g, bound / (norm(g) + 0.5)) for g in gradients]
    else:
        names = [layer.name for layer in flattened(layers_of(model))]
        own = {k: k.rpartition(".")[0] for k in gradients[0]}
        each = bound / math.sqrt(len(names))
        made, factors = clipping.PerLayer(bound), []
        for g in gradients:
            norms = {n: norm({k: x for k, x in g.items() if own[k] == n}) for n in names}
            factors.append({k: min(1.0, each / norms[own[k]]) for k in g})
    actual = private_sum(model, inputs, made, preconditioner=preconditioner)
    pairs = list(zip(gradients, factors, strict=True))
    assert_same(actual, {k: sum(f[k] * g[k] for g, f in pairs) for k in gradients[0]})


@pytest.mark.parametrize("name", ["linear", "conv2d", "wide", "layer norm", "own parameters"])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_have_no_scale(name, frozen):
    model, inputs = case(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.endswith(frozen))
    preconditioner, scales = scales_of(model)
    gradients = scaled_gradients(model, inputs, scales)
    bound = median_norm(gradients)
    actual = private_sum(model, inputs, bound, preconditioner=preconditioner)
    assert_same(actual, clipped_sum(gradients, bound))


@pytest.fixture
def small_blocks(monkeypatch):
    """Let memory be so scarce that no two samples' gradients, nor two rows of a scale, fit."""
    monkeypatch.setattr(scaled, "_BLOCK_BYTES", 1)


@pytest.mark.parametrize("name", ["linear", "wide", "conv2d grouped", "attention", "lstm"])
def test_gradients_that_are_formed_twice_give_the_same_sum(name, small_blocks):
    model, inputs = case(name)
    preconditioner, scales = scales_of(model)
    gradients = scaled_gradients(model, inputs, scales)
    bound = median_norm(gradients)
    own = copy.deepcopy(model)
    training, optimizer = private(own, bound, preconditioner=preconditioner)
    square(own(*inputs)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(own), clipped_sum(gradients, bound))
    if name == "wide":
        assert {layer.formula for layer in training.report().layers} == {"formed twice"}


@pytest.mark.parametrize("name", ["linear", "wide", "conv2d", "embedding", "layer norm"])
def test_microbatches_add_up_to_the_batch(name):
    model, inputs = case(name)
    preconditioner, scales = scales_of(model)
    gradients = scaled_gradients(model, inputs, scales)
    bound = median_norm(gradients)
    _, optimizer = private(model, bound, preconditioner=preconditioner)
    for part in (slice(0, 3), slice(3, 7)):
        square(model(*(x[part] for x in inputs))).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


KINDS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)), (6,)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9)), (40, 6)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.GELU()), (3, 9, 9)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", ["kept", "again"])
@pytest.mark.parametrize("seed", range(3))
def test_in_float32_one_sample_moves_the_sum_by_its_bound_at_most(kind, blocks, seed, request):
    if blocks == "again":
        request.getfixturevalue("small_blocks")
    torch.manual_seed(seed)
    make, shape = KINDS[kind]
    model, bound = make(), 0.01
    preconditioner, _ = scales_of(model)
    sizes = 10 ** torch.empty(5, *[1] * len(shape)).uniform_(-2, 3)
    x = torch.randn(5, *shape) * sizes

    def total(samples):
        own = copy.deepcopy(model)
        _, optimizer = private(own, bound, preconditioner=preconditioner)
        square(own(samples)).sum().backward()
        optimizer.step()
        return torch.cat([p.grad.double().flatten() for p in own.parameters()])

    moved = (total(x) - total(x[:4])).norm().item()
    assert 0 < moved <= bound * (1 + 1e-6), f"{moved / bound - 1:.3g} over the bound"


@pytest.mark.parametrize("a_size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("d_size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("s_size", [1e-30, 1.0, 1e30])
def test_norms_of_outer_products_are_not_low_however_large_or_small(a_size, d_size, s_size):
    torch.manual_seed(0)
    a, d = torch.randn(3, 50) * a_size, torch.randn(3, 4) * d_size
    scales = [torch.rand(4, 50) * s_size, torch.rand(4) * s_size]
    norms = scaled.OuterProducts(a, d, True).scaled(scales).sq_norms.sqrt()
    # One factor of each size at a time, so that squares stay within float64.
    weights = d.double().unsqueeze(2) * a.double().unsqueeze(1) * scales[0].double()
    shifts = d.double() * scales[1].double()
    wanted = torch.cat([weights.flatten(1), shifts], 1).norm(dim=1)
    # 55 additions, three products and a root, in both.
    assert ((norms / wanted - 1).abs() <= 2 * 60 * torch.finfo(torch.float64).eps).all()


@pytest.mark.parametrize("name", ["linear", "wide", "conv2d", "layer norm", "own parameters"])
def test_a_sample_that_is_not_finite_contributes_nothing(name, small_blocks):
    model, (x,) = case(name)
    preconditioner, scales = scales_of(model)
    gradients = scaled_gradients(model, (x,), scales)
    bound = median_norm(gradients)
    poisoned = torch.cat([x, torch.full_like(x[:1], math.nan)])
    training, optimizer = private(model, bound, preconditioner=preconditioner)
    square(model(poisoned)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))
    assert training.nonfinite_samples == 1


def test_rows_of_tokens_whose_errors_are_not_finite_contribute_nothing():
    model, (tokens,) = case("embedding")
    preconditioner, scales = scales_of(model)
    gradients = scaled_gradients(model, (tokens,), scales)
    bound = median_norm(gradients[1:])
    _, optimizer = private(model, bound, preconditioner=preconditioner)
    losses = square(model(tokens))
    (losses[0] * math.nan + losses[1:].sum()).backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients[1:], bound))


def test_gradients_that_are_longer_the_second_time_are_shortened_to_what_was_measured():
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    sq_norms = torch.tensor([4.0, 0.0, 9.0], dtype=torch.float64)
    norms = scaled.FormedAgain(lambda at: [rows[at]], (slice(0, 1), slice(1, 3)), sq_norms)
    total = torch.full((2,), math.nan, dtype=torch.float64)
    norms.add_to([total], torch.ones(3, dtype=torch.float64), accumulate=False)
    # (3, 4) has the length 5 and is shortened to 2; (1, 0) was measured longer and stays.
    torch.testing.assert_close(total, torch.tensor([2.2, 1.6], dtype=torch.float64))


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_gradients_that_are_finite_only_the_first_time_contribute_nothing(lost):
    rows = torch.tensor([[lost, 4.0], [1.0, 0.0]])
    sq_norms = torch.tensor([4.0, 1.0], dtype=torch.float64)
    norms = scaled.FormedAgain(lambda at: [rows[at]], (slice(0, 2),), sq_norms)
    total = torch.full((2,), math.nan)
    norms.add_to([total], torch.ones(2), accumulate=False)
    assert torch.equal(total, torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("size", [scaled._LEAST, scaled._LARGEST])
@pytest.mark.parametrize("error", [1e-10, 1.0, 1e10])
def test_a_gradient_that_float32_cannot_hold_does_not_poison_the_sum(size, error):
    model = nn.Linear(2, 1, bias=False)
    scale = torch.tensor([[size, 1.0]])
    fixed = FixedSides({"": Sides(scale=Scale({"weight": scale}))})
    _, optimizer = private(model, 1.0, preconditioner=fixed)
    a = torch.tensor([[1e30, 1e-10], [0.0, 1.0]])
    d = torch.tensor([error, 1.0])
    (model(a).squeeze(1) * d).sum().backward()
    optimizer.step()
    # The second sample is (0, 1) as it is; what is left is the first one's.
    own = model.weight.grad.double() - torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert own.norm() <= 1 + 1e-6


def test_noise_is_not_scaled():
    noisy = []
    for scale in (False, True):
        model, _ = case("linear")
        preconditioner = scales_of(model)[0] if scale else FixedSides({})
        with pytest.warns(UserWarning, match="seed"):
            key = NoiseKey.from_seed(5)
        _, optimizer = private(
            model, 1.0, preconditioner=preconditioner, noise_multiplier=1.0, noise_key=key
        )
        square(model(torch.zeros(0, 5, dtype=torch.float64))).sum().backward()
        optimizer.step()
        noisy.append(gradients_of(model))
    for name, gradient in noisy[0].items():
        assert gradient.abs().min() > 0 and torch.equal(gradient, noisy[1][name])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": torch.ones(3, 4)}, r"scale must be for \['bias', 'weight'\]"),
        ({"weight": torch.ones(4, 3), "bias": torch.ones(3)}, r"must be \[3, 4\] float32 on cpu"),
        ({"weight": torch.ones(3, 4).double(), "bias": torch.ones(3)}, "got .* float64"),
        ({"weight": torch.ones(3, 4) / 0, "bias": torch.ones(3)}, "finite .* got 12 elements"),
        ({"weight": torch.ones(3, 4), "bias": torch.zeros(3)}, "2.-64 to 2.64, got 3 elements"),
        ({"weight": torch.full((3, 4), 1e-42), "bias": torch.ones(3)}, "got 12 elements"),
        ({"weight": torch.full((3, 4), -1e30), "bias": torch.ones(3)}, "got 12 elements"),
    ],
)
def test_scales_that_do_not_fit_are_refused_before_the_first_step(values, message):
    with pytest.raises(ValueError, match=message):
        private(nn.Linear(4, 3), 1.0, preconditioner=FixedSides({"": Sides(scale=Scale(values))}))


def test_layers_that_share_a_weight_take_no_scale():
    model, _ = made("tied")
    name = next(n for n in private(copy.deepcopy(model), 1.0)[0].layers if "+" in n)
    scale = Sides(scale=Scale({"weight": torch.ones(11, 6).double()}))
    with pytest.raises(ValueError, match="share a weight take no scale"):
        private(model, 1.0, preconditioner=FixedSides({name: scale}))


def test_a_layer_has_factors_or_a_scale():
    with pytest.raises(ValueError, match="either factors or a scale"):
        Sides(Diagonal(torch.ones(3)), scale=Scale({}))


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding", "layer norm", "attention"])
def test_the_report_says_what_is_scaled_and_what_it_costs(name):
    model, inputs = case(name)
    training, _ = private(model, 1.0, preconditioner=scales_of(model)[0])
    square(model(*inputs)).sum().backward()
    for layer in training.report().layers:
        assert layer.preconditioner == f"scale of {layer.parameters} elements"
        assert layer.flops >= layer.parameters and layer.bytes > 0 and layer.reason


def test_factors_of_another_precision_are_refused_before_the_first_step():
    fixed = FixedSides({"": Sides(right=Diagonal(torch.ones(4, dtype=torch.float64)))})
    with pytest.raises(ValueError, match=r"right must be torch.float32 on cpu, got torch.float64"):
        private(nn.Linear(4, 3), 1.0, preconditioner=fixed)


def test_factors_of_private_data_make_every_later_state_void():
    own = Sides(right=Diagonal(torch.ones(4)), not_private="an oracle's")
    training, _ = private(nn.Linear(4, 3), 1.0, preconditioner=FixedSides({"": own}))
    assert training.void == "an oracle's"
    other = FixedSides({"": Sides(right=Diagonal(torch.ones(4)))})
    again, _ = private(nn.Linear(4, 3), 1.0, preconditioner=other)
    assert again.void is None
    again.load_state_dict(training.state_dict())
    assert again.void == "an oracle's"
    with pytest.raises(ValueError, match="not_private must be a reason"):
        Sides(not_private="")
