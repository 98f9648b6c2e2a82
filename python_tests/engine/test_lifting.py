"""Layers that are not given samples first: windows of samples, shared tables, weights of others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dpkernels.engine import Unsupported
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

T, D = 3, 4


class Direct(nn.Module):
    """Uses its child's weight beside calling it."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x):
        return (self.child(x) * self.child.weight.sum(0)).tanh()


class Table(nn.Module):
    """A parameter that is given nothing."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(T, D))

    def forward(self):
        return self.places


class Shared(nn.Module):
    """Adds what a child makes without samples, through layers that have rules of their own."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.linear = Table(), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x) + self.norm(self.linear(self.table()))


class RelativePositions(nn.Module):
    """Attention whose scores get a bias from a table, looked up once for all samples (T5)."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.query, self.bias = nn.Linear(D, D), nn.Embedding(2 * T, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        places = torch.arange(x.shape[1])
        bias = self.bias(places[None] - places[:, None] + T).permute(2, 0, 1).unsqueeze(0)
        q = self.query(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return (self.dropout((q @ q.mT + bias).softmax(-1)) @ q).transpose(1, 2).flatten(2)


class Handed(nn.Module):
    """Hands its bias on, so that only a module around both blocks can serve it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Bias(), Biased()

    def forward(self, x):
        y, bias = self.first(x)
        return self.second(y, bias)


class Bias(nn.Module):
    """Returns a tensor without samples beside one that has them."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(T, D), nn.Linear(D, D)

    def forward(self, x):
        bias = self.table(torch.arange(T)).t().contiguous().t()
        return self.linear(x) * bias, bias


class Biased(nn.Module):
    """Uses what another block has made."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, bias):
        return self.linear(x) * bias.sum(0)


class Windows(nn.Module):
    """Flattens samples and positions in front of its layers (OPT)."""

    def __init__(self, transposed=False):
        super().__init__()
        self.linear, self.norm, self.transposed = nn.Linear(D, D), nn.LayerNorm(D), transposed

    def forward(self, x):
        x = x.transpose(0, 1) if self.transposed else x
        y = self.norm(self.linear(x.reshape(-1, D)).tanh()).view(x.shape)
        return y.transpose(0, 1) if self.transposed else y


class Positions(nn.Module):
    """Passes positions, not samples, as the first axis."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x.transpose(0, 1)).transpose(0, 1).tanh()


class Prompt(nn.Module):
    """Looks a prompt up once and repeats it for each sample (PEFT's prompt tuning)."""

    def __init__(self):
        super().__init__()
        self.prompt, self.linear = nn.Embedding(2, D), nn.Linear(D, D)

    def forward(self, x):
        prompt = self.prompt(torch.arange(2).unsqueeze(0)).repeat(x.shape[0], 1, 1)
        return self.linear(torch.cat([prompt, x], 1)).tanh()


class Scaled(nn.Embedding):
    """Scales what it looks up (BART), at positions that it makes itself."""

    def forward(self, x, past: int = 0):
        return super().forward(torch.arange(past, x.shape[1])) * 0.5


class Scales(nn.Module):
    """Adds scaled positions."""

    def __init__(self):
        super().__init__()
        self.places, self.linear = Scaled(T + 2, D), nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x + self.places(x))


class InPlace(nn.Module):
    """Changes what a linear layer returns (Longformer)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        y = self.linear(x)
        y /= 2
        return y.tanh()


class Adapter(nn.Module):
    """Keeps its parameters in containers (PEFT)."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, D)
        self.scale = nn.ParameterDict({"default": torch.randn(D)})
        self.factors = nn.ParameterList([torch.randn(D, 2), torch.randn(2, D)])

    def forward(self, x):
        return self.base(x) * self.scale["default"] + x @ self.factors[0] @ self.factors[1]


class Alias(nn.Module):
    """Keeps the bias of its child under a name of its own (the head of BERT)."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(D, D)
        self.bias = self.decoder.bias

    def forward(self, x):
        return self.decoder(x).tanh()


class CalledPastHooks(nn.Module):
    """Calls a layer and a table by ``forward()``."""

    def __init__(self):
        super().__init__()
        self.linear, self.places = nn.Linear(D, D), nn.Embedding(T, D)

    def forward(self, x):
        return self.linear.forward(x) * self.places.forward(torch.arange(T))


MODELS = {
    "layers that are called past hooks": CalledPastHooks,
    "a linear layer's weight, used by another": lambda: Direct(nn.Linear(D, D)),
    "a table without an input": Shared,
    "relative positions": RelativePositions,
    "a bias that is handed on": Handed,
    "windows": Windows,
    "windows, positions first": lambda: Windows(transposed=True),
    "positions first": Positions,
    "a prompt that is repeated": Prompt,
    "an embedding with a forward pass": Scales,
    "outputs changed in place": InPlace,
    "parameters in containers": Adapter,
    "a bias with two names": Alias,
    "a nested lift": lambda: nn.Sequential(Shared(), RelativePositions(), Windows()),
    "a weight with a norm": lambda: parametrizations.weight_norm(nn.Linear(D, D)),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_those_of_single_samples(name):
    model = made(name)
    training, optimizer = private(copy.deepcopy(model), 0.1)
    # As many samples as positions among them: a layout is the model's, not the batch's.
    for samples in (T, 5, 1, 2):
        x = torch.randn(samples, T, D, dtype=torch.float64)
        training.model.load_state_dict(model.state_dict())
        square(training.model(x)).sum().backward()
        optimizer.step()
        assert_same(gradients_of(training.model), clipped_sum(sample_gradients(model, [x]), 0.1))


def rules(name):
    model = made(name)
    training, _ = private(model, 1.0)
    square(model(torch.randn(5, T, D, dtype=torch.float64))).sum().backward()
    return {layer.name: layer.rule for layer in training.report().layers}


def test_only_layers_without_samples_are_lifted():
    assert rules("relative positions") == {"query": "linear", "bias": "lifted"}
    assert rules("windows") == {"linear": "linear", "norm": "scale and shift"}
    assert rules("windows, positions first") == {"linear": "lifted", "norm": "lifted"}
    assert rules("an embedding with a forward pass") == {"places": "embedding", "linear": "linear"}
    assert rules("layers that are called past hooks")["linear"] == "linear"
    found = rules("a bias that is handed on")
    assert found == {"first.table": "lifted", "first.linear": "linear", "second.linear": "linear"}


def test_the_report_names_the_module_that_is_repeated():
    model = nn.Sequential(RelativePositions()).double()
    training, _ = private(model, 1.0)
    square(model(torch.randn(5, T, D, dtype=torch.float64))).sum().backward()
    (lifted,) = (x for x in training.report().layers if x.rule == "lifted")
    assert lifted.reason.startswith("served by 0 (RelativePositions); fallback: the module runs")


def test_what_is_lifted_leaves_with_the_training():
    model = made("a nested lift")
    training, _ = private(model, 1.0)
    x = torch.randn(5, T, D, dtype=torch.float64)
    wanted = square(model(x)).sum()
    training.detach()
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(square(model(x)).sum(), wanted)


def test_dropout_in_a_module_that_is_repeated():
    torch.manual_seed(0)
    model = RelativePositions(dropout=0.5).double()
    x = torch.randn(5, T, D, dtype=torch.float64)
    _, optimizer = private(model, 0.1)
    square(model(x)).sum().backward()
    optimizer.step()
    assert all(g.isfinite().all() and g.any() for g in gradients_of(model).values())


def test_a_module_that_mixes_samples_is_not_repeated():
    class Mixing(Shared):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    model = Mixing().double()
    private(model, 1.0)
    with pytest.raises(Unsupported, match=r"repeated for table \(Table\).*mixes samples"):
        square(model(torch.randn(5, T, D, dtype=torch.float64))).sum().backward()


def test_a_layer_that_nothing_can_serve_is_refused_before_the_first_step():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = Table()

        def forward(self, x):
            return (x * self.table()).flatten(1).sum()

    model = Summed().double()
    private(model, 1.0)
    with pytest.raises(Unsupported, match=r"table \(Table\).*the model itself.*without samples"):
        model(torch.randn(5, T, D, dtype=torch.float64))


def test_factors_for_a_layer_that_must_be_lifted_are_refused():
    from dpkernels.ops.factor import Diagonal
    from dpkernels.precondition import FixedSides, Sides

    model = made("positions first")
    sides = {"linear": Sides(left=Diagonal(torch.ones(D, dtype=torch.float64)))}
    private(model, 1.0, preconditioner=FixedSides(sides))
    with pytest.raises(ValueError, match=r"linear.*lifted.*takes no preconditioner"):
        model(torch.randn(5, T, D, dtype=torch.float64))


def test_a_tied_weight_that_another_module_uses_is_refused():
    class Tied(Direct):
        def __init__(self):
            super().__init__(nn.Linear(D, D))
            self.other = nn.Linear(D, D)
            self.other.weight = self.child.weight

        def forward(self, x):
            return super().forward(self.other(x))

    model = Tied().double()
    private(model, 1.0)
    with pytest.raises(Unsupported, match=r"shares a parameter with another layer"):
        model(torch.randn(5, T, D, dtype=torch.float64))


def test_a_recurrent_weight_that_another_module_uses_is_refused():
    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.LSTM(D, D, batch_first=True)

        def forward(self, x):
            return self.child(x)[0] * self.child.weight_hh_l0.sum(0)

    model = Peeking().double()
    private(model, 1.0)
    with pytest.raises(Unsupported, match=r"child \(LSTM\).*outside of its own forward pass"):
        model(torch.randn(5, T, D, dtype=torch.float64))


def test_removing_any_record_moves_the_sum_by_at_most_the_bound():
    """Whatever rule serves a layer: at no noise, neighbours differ by one clipped gradient."""
    bound = 0.05
    for name in MODELS:
        model = made(name)
        x = 10 * torch.randn(4, T, D, dtype=torch.float64)
        whole = private_sum(model, [x], bound)
        for i in range(4):
            rest = private_sum(model, [x[torch.arange(4) != i]], bound)
            moved = sum((whole[key] - rest[key]).square().sum() for key in whole).sqrt()
            assert moved <= bound * (1 + 1e-6), name


def test_a_bound_that_clips_nothing_gives_the_plain_gradient():
    model = made("a nested lift")
    x = torch.randn(5, T, D, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = 100 * median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))
