"""Any module: per-sample gradients by running it again under vmap, or a refusal by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpkernels.engine import Unsupported
from dpkernels.engine.layers.randomness import Recorded
from python_tests.engine.models import Case, vectors
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
from python_tests.engine.own_modules import (
    Lora,
    Matrix,
    Mean,
    Normalised,
    Product,
    RMSNorm,
    Scale,
    between,
)


class Nested(nn.Module):
    """Takes a mask, a flag and a number; returns a dict of tuples, of which one part is unused."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x, mask=None, *, scale, flag=True):
        h = torch.softmax((x @ self.matrix @ x.mT).masked_fill(~mask, -1e9), -1) @ self.inner(x)
        parts = (scale * h, h.argmax(-1), None) if flag else ()
        return {"parts": parts, "again": [x @ self.matrix], "unused": h.exp(), "name": "h"}


class Outer(nn.Module):
    """Calls ``Nested`` with a mask that all samples share."""

    def __init__(self):
        super().__init__()
        self.first, self.nested = nn.Linear(4, 4), Nested()

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        found = self.nested(self.first(x), mask=mask, scale=0.5)
        return found["parts"][0] + found["again"][0].tanh()


class Deep(nn.Module):
    """A module with a parameter around others that have rules of their own, vmap again included."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Sequential(Lora(4, 4), RMSNorm(4), nn.Tanh(), nn.LayerNorm(4))

    def forward(self, x):
        return self.inner(x @ self.matrix) @ self.matrix


class TwoInputs(nn.Module):
    """A bilinear form of a sample's two halves."""

    def __init__(self):
        super().__init__()
        self.form = nn.Bilinear(2, 2, 3)

    def forward(self, x):
        return self.form(x[..., :2].contiguous(), x[..., 2:].contiguous())


CASES = {
    "mean": Case(lambda: between(Mean(4), 4, 4), vectors(3, 4)),
    "matrix": Case(lambda: between(Matrix(4, 3), 4, 3), vectors(2, 4)),
    "product": Case(lambda: between(Product(4, 3), 4, 3), vectors(4)),
    "product, as many inputs as samples": Case(lambda: between(Product(5, 5), 5, 5), vectors(5)),
    "norm": Case(lambda: between(Normalised(4), 4, 4), vectors(4)),
    "LoRA": Case(lambda: between(Lora(4, 3), 4, 3), vectors(3, 4)),
    "prelu": Case(lambda: between(nn.PReLU(3), 4, 4), vectors(3, 4)),
    "bilinear": Case(TwoInputs, vectors(4)),
    "nested outputs": Case(Outer, vectors(3, 4)),
    "rules inside rules": Case(Deep, vectors(3, 4)),
}


def made(name, samples=5):
    torch.manual_seed(0)
    return CASES[name].model().double(), CASES[name].inputs(samples)


@pytest.mark.parametrize(("samples", "reduction"), [(1, "sum"), (5, "sum"), (5, "mean")])
@pytest.mark.parametrize("name", CASES)
def test_clipped_sums_are_those_of_single_samples(name, samples, reduction):
    model, inputs = made(name, samples)
    gradients = sample_gradients(model, inputs)
    bound = 0.9 * median_norm(gradients)
    got = private_sum(model, inputs, bound, reduction=reduction)
    assert_same(got, clipped_sum(gradients, bound))


@pytest.mark.parametrize("name", CASES)
def test_the_report_names_the_fallback_and_its_cost(name):
    model, inputs = made(name)
    training, _ = private(model, 1.0)
    square(model(*inputs)).sum().backward()
    found = [layer for layer in training.report().layers if layer.rule == "vmap"]
    assert found
    for layer in found:
        assert layer.reason.startswith("fallback: the module runs forward and backward once more")
        assert layer.flops >= 4 * 5 * layer.parameters


def test_flops_of_the_repeated_pass_are_counted():
    model, inputs = made("matrix")
    training, _ = private(model, 1.0)
    square(model(*inputs)).sum().backward()
    layer = training.report().layers[1]
    samples, positions, weights = 5, 2, 4 * 3
    # One product forward, one for the matrix's gradient; norms and sum of stored gradients.
    assert layer.flops == 2 * 2 * samples * positions * weights + 4 * samples * weights


def test_frozen_parameters_beside_trained_ones_are_left_out():
    model, inputs = made("LoRA")
    model[2].a.requires_grad_(False)
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))


def test_a_mask_as_long_as_the_batch_is_known_from_earlier_batches():
    torch.manual_seed(0)
    model = Outer().double()
    training, optimizer = private(copy.deepcopy(model), 0.1)
    for shape in ((5, 3, 4), (3, 3, 4), (1, 3, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        training.model.load_state_dict(model.state_dict())
        square(training.model(x)).sum().backward()
        optimizer.step()
        assert_same(gradients_of(training.model), clipped_sum(sample_gradients(model, [x]), 0.1))


def test_a_mask_as_long_as_the_first_batch_is_refused():
    model = Outer().double()
    private(model, 1.0)
    with pytest.raises(Unsupported, match=r"nested \(Nested\)"):
        square(model(torch.randn(3, 3, 4, dtype=torch.float64))).sum().backward()


def test_what_follows_may_work_in_place():
    torch.manual_seed(0)
    model = nn.Sequential(Matrix(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))


def test_gradient_checkpointing_changes_nothing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Deep()

        def forward(self, x):
            return checkpoint(
                self.inner, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False
            )

    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(5, 3, 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))


def test_the_repeated_pass_computes_in_autocasts_dtype():
    """Otherwise its outputs would be those of float32, which the forward pass did not give."""
    torch.manual_seed(0)
    seen = []

    class Watched(Matrix):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    model = between(Watched(4, 3), 4, 3)
    _, optimizer = private(model, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(5, 2, 4))
    forward = len(seen)
    square(output.float()).sum().backward()
    assert len(seen) == forward + 1 and set(seen) == {torch.bfloat16}
    optimizer.step()
    assert all(g.isfinite().all() for g in gradients_of(model).values())


def test_an_empty_batch_adds_nothing():
    model, (x,) = made("LoRA")
    _, optimizer = private(model, 1.0)
    square(model(x[:0])).sum().backward()
    optimizer.step()
    assert not any(g.any() for g in gradients_of(model).values())


def test_a_sample_that_is_not_finite_is_dropped():
    model, (x,) = made("LoRA")
    wanted = private_sum(model, [x[1:]], 0.1)
    x[0, 1, 2] = torch.inf
    training, optimizer = private(model, 0.1)
    square(model(x)).sum().backward()
    optimizer.step()
    assert training.nonfinite_samples == 1
    assert_same(gradients_of(model), wanted)


class Dropped(Matrix):
    """A product with dropout inside."""

    def __init__(self):
        super().__init__(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(super().forward(x))


class FunctionalDropout(Matrix):
    """Dropout that is not a module."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class FeatureDropout(Matrix):
    """Drops whole channels, in a way that is not recorded."""

    def forward(self, x):
        return nn.functional.alpha_dropout(super().forward(x), 0.5, training=True)


class AttentionDropout(Matrix):
    """Dropout inside of torch's attention, with a mask that all samples share."""

    def forward(self, x):
        q = super().forward(x).unsqueeze(1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return nn.functional.scaled_dot_product_attention(q, q, q, mask, 0.5).squeeze(1)


class DropPath(Matrix):
    """Stochastic depth: whole samples, by random numbers that are changed in place."""

    def forward(self, x):
        drawn = torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), dtype=x.dtype)
        return x + super().forward(x) * drawn.add_(0.5).floor_()


class SharedDropout(Matrix):
    """Dropout of the parameter itself, the same for all samples, and of windows."""

    def forward(self, x):
        matrix = nn.functional.dropout(self.matrix, 0.3)
        windows = nn.functional.dropout((x @ matrix).flatten(0, 1), 0.3, inplace=True)
        return windows.view_as(x)


class InPlace(Matrix):
    """Changes its input."""

    def forward(self, x):
        return x.mul_(2) @ self.matrix.t()


class Branching(Matrix):
    """Looks at the data."""

    def forward(self, x):
        y = super().forward(x)
        return y if bool((y.sum() > 0) | (y.sum() <= 0)) else -y


class BatchBranching(Matrix):
    """Computes something else for a single sample."""

    def forward(self, x):
        y = super().forward(x)
        return y if bool(y.isfinite().all()) and len(x) > 1 else -y


class Centred(Matrix):
    """Takes the mean over samples away."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class CentredScale(Scale):
    """The same where copies would do."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Running(Matrix):
    """Counts its calls in a buffer, in place or not."""

    def __init__(self, in_place):
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return super().forward(x)


class Penalised(Matrix):
    """Returns a penalty for the parameters beside its output."""

    def forward(self, x):
        return super().forward(x) + self.matrix.sum(), self.matrix.square().sum()


class Wrapped(Matrix):
    """Returns an object that nobody can look into."""

    def forward(self, x):
        return type("Result", (), {"y": super().forward(x)})()


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (FeatureDropout(4, 4), r"FeatureDropout.*random"),
        (InPlace(4, 4), r"\(InPlace\).*in place"),
        (BatchBranching(4, 4), r"\(BatchBranching\).*mixes samples"),
        (Centred(4, 4), r"\(Centred\).*mixes samples"),
        (CentredScale(4), r"\(CentredScale\).*mixes samples"),
        (Running(in_place=True), r"\(Running\).*writes to this tensor"),
        (Running(in_place=False), r"\(Running\).*writes to this tensor"),
        (Wrapped(4, 4), r"Wrapped.* returns a Result"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_what_cannot_be_repeated_is_refused_before_the_first_step(module, match):
    model = copy.deepcopy(module).double()
    private(model, 1.0)
    with pytest.raises(Unsupported, match=f"(?s){match}"):
        square(model(torch.randn(5, 4, dtype=torch.float64))).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "module",
    [
        Dropped(),
        FunctionalDropout(4, 4),
        AttentionDropout(4, 4),
        DropPath(4, 4),
        SharedDropout(4, 4),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_repeated_pass_uses_the_random_numbers_of_the_forward_pass(module):
    """The oracle replays what the forward pass drew; its masks are found by a batch of outputs."""
    torch.manual_seed(0)
    model, x = copy.deepcopy(module).double(), torch.randn(5, 3, 4, dtype=torch.float64)
    training, optimizer = private(copy.deepcopy(model), 0.1)
    for _ in range(2):
        training.model.load_state_dict(model.state_dict())
        torch.manual_seed(1)
        loss = square(training.model(x))
        loss.sum().backward()
        optimizer.step()
        torch.manual_seed(1)
        with Recorded() as random:
            wanted = square(model(x))
        torch.testing.assert_close(loss, wanted)
        assert random.numbers
        gradients = [
            dict(zip(dict(model.named_parameters()), found, strict=True))
            for found in (
                torch.autograd.grad(y, list(model.parameters()), retain_graph=True) for y in wanted
            )
        ]
        assert_same(gradients_of(training.model), clipped_sum(gradients, 0.1))


def test_a_module_that_looks_at_its_data_runs_sample_by_sample():
    torch.manual_seed(0)
    model, x = Branching(4, 4).double(), torch.randn(5, 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))
    training, _ = private(model, 1.0)
    square(model(x)).sum().backward()
    assert "one sample after the other" in training.report().layers[0].reason


def test_dropout_that_is_switched_off_is_no_obstacle():
    torch.manual_seed(0)
    model, x = Dropped().double().eval(), torch.randn(5, 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))


def test_a_loss_of_an_output_without_samples_is_refused():
    model = Penalised(4, 4).double()
    private(model, 1.0)
    output, penalty = model(torch.randn(5, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"\(Penalised\).*without an axis of samples"):
        (square(output).sum() + penalty).backward()
