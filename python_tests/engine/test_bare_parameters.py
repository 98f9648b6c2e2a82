"""Parameters of users' own modules: copies for each sample, where the module takes them apart."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpkernels.engine import Unsupported
from python_tests.engine.models import Case, images, tokens, vectors
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
    Counted,
    Leaky,
    Lora,
    Mean,
    Normalised,
    Positions,
    RMSNorm,
    Scale,
    VisionTransformer,
    between,
)
from python_tests.tolerance import assert_as_accurate

CASES = {
    "rms norm": Case(lambda: between(RMSNorm(4), 4, 4), vectors(3, 4)),
    "rms norm of vectors": Case(lambda: between(RMSNorm(4), 4, 4), vectors(4)),
    "as many positions as samples": Case(lambda: between(RMSNorm(4), 4, 4), vectors(5, 4)),
    "as wide as the batch": Case(lambda: between(RMSNorm(5), 5, 5), vectors(5)),
    "one number": Case(lambda: between(Scale(), 4, 4), vectors(3, 4)),
    "a vector of one": Case(lambda: between(Scale(1), 4, 4), vectors(3, 4)),
    "one row": Case(lambda: between(Scale(1, 4), 4, 4), vectors(3, 4)),
    "channels": Case(lambda: nn.Sequential(nn.Conv2d(2, 4, 2), Scale(4, 1, 1)), images(2, 4, 5)),
    "channels with a leading axis": Case(
        lambda: nn.Sequential(Scale(1, 2, 1, 1), nn.Conv2d(2, 4, 2)), images(2, 4, 5)
    ),
    "positions": Case(lambda: nn.Sequential(Positions(), nn.Linear(6, 3)), tokens(11, 4)),
    "vision transformer": Case(VisionTransformer, images(2, 4, 6)),
    "LoRA as a batched product": Case(
        lambda: between(Lora(4, 3, batched=True), 4, 3), vectors(2, 4)
    ),
}


def made(case, samples=5):
    torch.manual_seed(0)
    return case.model().double(), case.inputs(samples)


def rules(training):
    return {layer.name: layer.rule for layer in training.report().layers}


@pytest.mark.parametrize(("samples", "reduction"), [(1, "sum"), (5, "sum"), (5, "mean")])
@pytest.mark.parametrize("name", CASES)
def test_clipped_sums_are_those_of_single_samples(name, samples, reduction):
    model, inputs = made(CASES[name], samples)
    gradients = sample_gradients(model, inputs)
    bound = 0.9 * median_norm(gradients)
    got = private_sum(model, inputs, bound, reduction=reduction)
    assert_same(got, clipped_sum(gradients, bound))


@pytest.mark.parametrize("name", CASES)
def test_copies_serve_modules_that_use_parameters_elementwise(name):
    model, inputs = made(CASES[name])
    plain = model(*inputs)
    training, _ = private(model, 1.0)
    output = model(*inputs)
    torch.testing.assert_close(output, plain)
    square(output).sum().backward()
    assert "broadcast parameter" in rules(training).values()
    assert "vmap" not in rules(training).values()


@pytest.mark.parametrize(
    "module", [Mean(4), Normalised(4), Leaky(4), Counted(4)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("samples", [3, 4])
def test_copies_that_a_module_does_not_take_apart_are_rejected(module, samples):
    torch.manual_seed(0)
    model = between(copy.deepcopy(module), 4, 4).double()
    x = torch.randn(samples, 2, 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))
    training, _ = private(model, 1.0)
    square(model(x)).sum().backward()
    assert rules(training)["2"] == "vmap"


def test_copies_with_another_meaning_are_rejected_beside_random_numbers_too():
    class CountedDropout(Counted):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    model = CountedDropout(4)
    training, _ = private(model, 1.0)
    square(model(torch.randn(5, 4))).sum().backward()
    assert set(rules(training).values()) == {"vmap"}


def test_what_holds_for_one_sample_is_not_taken_to_hold_for_more():
    torch.manual_seed(0)
    model = between(Normalised(4), 4, 4).double()
    training, optimizer = private(copy.deepcopy(model), 0.1)
    for samples in (1, 5):
        x = torch.randn(samples, 4, dtype=torch.float64)
        training.model.load_state_dict(model.state_dict())
        square(training.model(x)).sum().backward()
        optimizer.step()
        assert_same(gradients_of(training.model), clipped_sum(sample_gradients(model, [x]), 0.1))


def test_frozen_parameters_beside_trained_ones_are_left_out():
    model, inputs = made(CASES["vision transformer"])
    model.places.requires_grad_(False)
    model.blocks[0].scale.requires_grad_(False)
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))


def test_batches_of_other_sizes_and_shapes_follow():
    torch.manual_seed(0)
    model = between(RMSNorm(4), 4, 4).double()
    training, optimizer = private(copy.deepcopy(model), 0.1)
    for shape in ((3, 4), (5, 4), (1, 4), (2, 3, 4), (4, 3, 4), (0, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        training.model.load_state_dict(model.state_dict())
        square(training.model(x)).sum().backward()
        optimizer.step()
        got = gradients_of(training.model)
        if shape[0]:
            assert_same(got, clipped_sum(sample_gradients(model, [x]), 0.1))
        else:
            assert not any(g.any() for g in got.values())


def test_the_trial_leaves_no_trace():
    """Random numbers, inputs and the parameters are what they would have been without it."""
    torch.manual_seed(0)
    model = VisionTransformer(dropout=0.5).double()
    x = torch.randn(5, 2, 4, 6, dtype=torch.float64)
    before, state = x.clone(), copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    wanted, after = model(x), torch.rand(3)
    training, _ = private(model, 1.0)
    torch.manual_seed(1)
    output = model(x)
    torch.testing.assert_close(output, wanted)
    assert torch.equal(torch.rand(3), after)
    assert torch.equal(x, before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    square(output).sum().backward()
    assert rules(training)["(the model itself)"] == "broadcast parameter"


def test_an_input_that_is_changed_in_place_is_changed_once():
    class InPlace(Scale):
        def forward(self, x):
            return super().forward(x.mul_(2))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), InPlace(4)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    plain = model(x)
    private(model, 1.0)
    torch.testing.assert_close(model(x), plain)


def test_the_parameters_are_back_after_an_error():
    class Failing(Scale):
        def forward(self, x):
            y = super().forward(x)
            if torch.is_grad_enabled():
                raise ArithmeticError
            return y

    model = Failing(4).double()
    own = dict(model.named_parameters())
    private(model, 1.0)
    with pytest.raises(ArithmeticError):
        model(torch.randn(3, 4, dtype=torch.float64))
    assert all(p is own[name] for name, p in model.named_parameters())


def test_gradient_checkpointing_changes_nothing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = between(RMSNorm(4), 4, 4)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(5, 3, 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))


def test_float32_is_as_accurate_as_a_loop():
    model, (x,) = made(CASES["vision transformer"])
    single = copy.deepcopy(model).float()
    gradients = sample_gradients(model, [x.float().double()])
    bound = median_norm(gradients)
    exact, got = clipped_sum(gradients, bound), private_sum(single, [x.float()], bound)
    plain = clipped_sum(sample_gradients(single, [x.float()]), bound)
    for name in ("token", "places", "blocks.0.scale", "blocks.1.norm.weight"):
        assert_as_accurate(got[name], plain[name], exact[name])


def test_a_sample_that_is_not_finite_is_dropped_even_from_the_trial():
    torch.manual_seed(0)
    model = between(RMSNorm(4), 4, 4).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    wanted = private_sum(model, [x[1:]], 0.1)
    x[0, 1, 2] = torch.nan
    training, optimizer = private(model, 0.1)
    square(model(x)).sum().backward()
    optimizer.step()
    assert training.nonfinite_samples == 1
    assert rules(training)["2"] == "broadcast parameter"
    assert_same(gradients_of(model), wanted)


def test_lists_of_parameters_are_refused_before_anything_runs():
    model = nn.Sequential(nn.Linear(3, 3), nn.ParameterList([torch.zeros(3)]))
    with pytest.raises(Unsupported, match=r"1 \(ParameterList\).*register them in the module"):
        private(model, 1.0)


def test_a_module_that_keeps_running_state_is_refused_and_put_back():
    class Running(Scale):
        def __init__(self):
            super().__init__(4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return super().forward(x - self.mean)

    model = Running()
    private(model, 1.0)
    with pytest.raises(Unsupported, match="writes to this tensor"):
        model(torch.randn(3, 4))


def test_sharing_a_parameter_between_modules_is_refused():
    model = nn.Sequential(Scale(4), Scale(4))
    model[1].weight = model[0].weight
    with pytest.raises(Unsupported, match=r"0 \(Scale\) and 1 \(Scale\) share"):
        private(model, 1.0)
