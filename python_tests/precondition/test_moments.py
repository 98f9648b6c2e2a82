"""A and G are the second moments of what single-sample autograd finds, for every kind of layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpkernels.precondition import Estimation, Kfac, LayerMoments, estimate_moments
from dpkernels.precondition.estimate import started
from python_tests.engine.test_transposed_linear import Conv1D
from python_tests.precondition.factors import (
    Fixed,
    assert_close_at_scale,
    cross_entropy,
    sample_moments,
)

SHARINGS = ("expand", "reduce")


class Explicit(nn.Module):
    """Self-attention as two linear layers, with the names that the engine's sublayers have."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        width, self.heads = attention.embed_dim, attention.num_heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.in_proj.weight, self.in_proj.bias = attention.in_proj_weight, attention.in_proj_bias
        self.out_proj.load_state_dict(attention.out_proj.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.in_proj(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(*heads)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, x, x, need_weights=False)[0]


class Loop(nn.Module):
    """An Elman network as two linear layers that are called once for each step."""

    def __init__(self, recurrent: nn.RNN) -> None:
        super().__init__()
        self.ih_l0, self.hh_l0 = nn.Linear(4, 5), nn.Linear(5, 5)
        for part in ("ih", "hh"):
            layer = getattr(self, f"{part}_l0")
            layer.weight = getattr(recurrent, f"weight_{part}_l0")
            layer.bias = getattr(recurrent, f"bias_{part}_l0")

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 5)
        for step in x.unbind(1):
            h = torch.tanh(self.ih_l0(step) + self.hh_l0(h))
        return h


class LastOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]


def probes(*shape: int, samples: int = 6) -> Fixed:
    torch.manual_seed(1)
    x = torch.randn(samples, *shape, dtype=torch.float64)
    return Fixed([x], torch.randint(3, (samples,)))


def found(model: nn.Module, probe: Fixed, **options: object):
    # The samples in two batches of different size, so that these are weighted.
    batches = [probe.batch(len(probe.targets), None) for _ in range(2)]
    (first, labels), (second, more) = batches
    parts = [
        (tuple(x[:4] for x in first), labels[:4]),
        (tuple(x[4:] for x in second), more[4:]),
    ]
    return estimate_moments(model, parts, cross_entropy, Estimation(**options))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (2, 4)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(3, 4, 2)
        ),
        (2, 7, 6),
    ),
    "circular": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", dilation=2)),
        (2, 6, 5),
    ),
    "loop": (lambda: Loop(nn.RNN(4, 5)), (3, 4)),
}


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", MODELS)
def test_moments_are_those_of_single_samples(name, sharing):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, probe = make().double(), probes(*shape)
    moments = found(model, probe, sharing=sharing)
    assert set(moments) == {
        n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)
    }
    for layer, both in moments.items():
        a, g = sample_moments(model, model.get_submodule(layer), probe, sharing)
        assert_close_at_scale(both.activations, a)
        assert_close_at_scale(both.errors, g)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_sublayers_have_the_moments_of_the_linear_layers_that_they_are(kind, sharing):
    torch.manual_seed(0)
    if kind == "attention":
        model, probe, prefix = SelfAttention().double(), probes(3, 6), "inside"
        explicit = Explicit(model.inside).double()
    else:
        model, probe, prefix = LastOutput().double(), probes(3, 4), "rnn"
        explicit = Loop(model.rnn)
    moments = found(model, probe, sharing=sharing)
    assert len(moments) == 2
    for name, layer in explicit.named_children():
        a, g = sample_moments(explicit, layer, probe, sharing)
        assert_close_at_scale(moments[f"{prefix}.{name}"].activations, a)
        assert_close_at_scale(moments[f"{prefix}.{name}"].errors, g)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", MODELS)
def test_diagonals_are_those_of_the_full_moments(name, sharing):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, probe = make().double(), probes(*shape)
    full = found(model, probe, sharing=sharing)
    for layer, both in found(model, probe, sharing=sharing, diagonal=True).items():
        assert_close_at_scale(both.activations, full[layer].activations.diagonal())
        assert_close_at_scale(both.errors, full[layer].errors.diagonal())


def test_attention_over_something_else_has_positions_of_all_its_products():
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.MultiheadAttention(4, 2, batch_first=True, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            other = x.flip(1).cos()
            return self.inside(x[:, :2], other, other, need_weights=False)[0]

    torch.manual_seed(0)
    model, probe = Cross().double(), probes(3, 4)
    moments = found(model, probe)["inside.in_proj"]
    x = probe.inputs[0]
    rows = torch.cat([x[:, :2].reshape(-1, 4), x.cos().reshape(-1, 4)])
    assert_close_at_scale(moments.activations, rows.T @ rows / len(rows))
    # No position has errors of queries and of keys.
    assert moments.errors[:4, 4:].abs().max() == 0 and moments.errors.diagonal().min() > 0


def test_an_embedding_has_the_frequencies_of_its_tokens_and_no_padding():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4, padding_idx=2), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    tokens = torch.tensor([[1, 2, 1], [3, 2, 2], [6, 1, 0]])
    probe = Fixed([tokens], torch.tensor([0, 1, 2]))
    both = estimate_moments(model, [probe.batch(3, None)], cross_entropy, Estimation())["0"]
    counts = torch.tensor([1, 3, 0, 1, 0, 0, 1], dtype=torch.float64)
    # Frequencies are float32.
    torch.testing.assert_close(both.activations, counts / 6, rtol=2.0**-24, atol=0)
    embedded = model[0](tokens).detach().requires_grad_()
    cross_entropy(model[2](embedded.flatten(1)), probe.targets).sum().backward()
    d = embedded.grad[tokens != 2]
    assert_close_at_scale(both.errors, d.T @ d / 6)


def test_moments_do_not_scale_with_the_probe_batch():
    torch.manual_seed(0)
    model, probe = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), probes(4)
    few, many = (
        Kfac(model, probe, cross_entropy, batches=1, batch_size=size, sides="AG").moments()["0"]
        for size in (6, 600)
    )
    assert_close_at_scale(many.errors, few.errors)
    assert_close_at_scale(many.activations, few.activations)


@pytest.mark.parametrize("reduction", ["mean", "mean of none"])
def test_a_loss_that_is_an_average_is_refused(reduction):
    def average(outputs: Tensor, targets: Tensor) -> Tensor:
        if reduction == "mean":
            return functional.cross_entropy(outputs, targets)
        return cross_entropy(outputs, targets) / len(targets)

    kfac = Kfac(nn.Linear(4, 3).double(), probes(4), average)
    with pytest.raises(ValueError, match="it is an average; use reduction='sum'"):
        kfac.refresh()


def test_a_sum_and_a_vector_of_losses_are_the_same():
    model = nn.Linear(4, 3).double()
    vector = Kfac(model, probes(4), cross_entropy, sides="AG").moments()[""]
    total = Kfac(model, probes(4), lambda y, t: cross_entropy(y, t).sum(), sides="AG").moments()[""]
    assert torch.equal(vector.errors, total.errors)


@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_transposed_linear_layer_has_no_column_for_its_bias(positions):
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(5, 4), nn.Tanh(), Conv1D(3, 5)).double()
    probe = probes(*positions, 4)
    for name, both in found(model, probe).items():
        a, g = sample_moments(model, model[int(name)], probe, "expand")
        assert_close_at_scale(both.activations, a[:-1, :-1])
        assert_close_at_scale(both.errors, g)


def test_frozen_parameters_have_no_column_and_no_side():
    torch.manual_seed(0)
    model, probe = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), probes(4)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    moments = found(model, probe)
    _, g = sample_moments(model, model[0], probe, "expand")
    a, _ = sample_moments(model, model[2], probe, "expand")
    assert moments["0"].activations is None
    assert_close_at_scale(moments["0"].errors, g)
    assert_close_at_scale(moments["2"].activations, a[:-1, :-1])


def test_moments_are_loaded_beside_the_layer():
    # Checkpoints are read to the CPU; meta stands in for a device that need not be there.
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    probe = probes(4)
    saved = found(model.double(), probe)
    model.to("meta")
    for name, moments in started(model, lambda x: LayerMoments(x, Estimation())).items():
        moments.load_state_dict(saved[name].state_dict())
        assert moments.activations.device.type == moments.errors.device.type == "meta"
        assert moments.activations.shape == saved[name].activations.shape


def test_few_vectors_at_a_time_have_the_moments_of_all():
    torch.manual_seed(0)
    model, probe = nn.Sequential(nn.Linear(4, 3)).double(), probes(4, samples=9)
    (x,), targets = probe.inputs, probe.targets
    place = torch.empty_like(x[:3])  # a loader may hand out the same memory again
    batches = (((place.copy_(x[k : k + 3]),), targets[k : k + 3]) for k in (0, 3, 6))
    both = estimate_moments(model, batches, cross_entropy, Estimation())["0"]
    a, g = sample_moments(model, model[0], probe, "expand")
    assert_close_at_scale(both.activations, a)
    assert_close_at_scale(both.errors, g)


@pytest.mark.parametrize("samples", [2, 9])
def test_what_is_not_finite_is_refused_however_few_there_are(samples):
    model, probe = nn.Linear(4, 3).double(), probes(4, samples=samples)
    probe.inputs[0][0, 0] = torch.inf
    with pytest.raises(ValueError, match="look at the probes"):
        estimate_moments(model, [probe.batch(samples, None)], cross_entropy, Estimation())
