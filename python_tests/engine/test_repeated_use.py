"""A layer that is used several times in one forward pass: its gradient is the sum of all uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels.ops.factor import Diagonal, Full
from dpkernels.precondition import FixedSides, Sides
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    gradients_of,
    median_norm,
    preconditioned,
    private,
    private_sum,
    sample_gradients,
    square,
)
from python_tests.engine.own_modules import Lora, RMSNorm, Scale, VisionTransformer
from python_tests.engine.test_transposed_linear import Conv1D


class Repeated(nn.Module):
    """Calls one layer three times; outputs of the first two are inputs of the next."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        first = torch.tanh(self.layer(x))
        second = self.layer(first)
        third = self.layer(x.flip(-1))
        return torch.cat([second.flatten(1), third.flatten(1).tanh()], 1)


LAYERS = {
    "conv1d": (lambda: nn.Conv1d(3, 3, 3, padding=2, dilation=2), (3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 3, (3, 2), stride=(1, 2), padding=1), (3, 5, 6)),
    "conv2d without bias": (lambda: nn.Conv2d(3, 3, 2, bias=False), (3, 4, 5)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 4, 3, groups=2), (4, 6, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 3, 2, groups=3), (3, 4, 5)),
    "conv2d same": (lambda: nn.Conv2d(3, 3, 4, padding="same"), (3, 5, 5)),
    "conv2d circular": (lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), (3, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (2, 4, 3, 3)),
    "transposed 1d": (
        lambda: nn.ConvTranspose1d(3, 3, 3, stride=2, padding=1, output_padding=1),
        (3, 4),
    ),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 4, 3, groups=2, dilation=2), (4, 3, 2)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 2, 2, bias=False), (2, 2, 3, 2)),
    "transposed linear": (lambda: Conv1D(4, 4), (3, 4)),
    "broadcast": (lambda: RMSNorm(4), (3, 4)),
    "broadcast, two parameters": (lambda: Scale(4), (4,)),
    "vmap": (lambda: Lora(4, 4), (3, 4)),
}


def made(name, samples):
    torch.manual_seed(0)
    layer, size = LAYERS[name]
    return Repeated(layer()).double(), torch.randn(samples, *size, dtype=torch.float64)


@pytest.mark.parametrize(("samples", "reduction"), [(1, "sum"), (5, "sum"), (5, "mean")])
@pytest.mark.parametrize("name", LAYERS)
def test_clipped_sums_are_those_of_single_samples(name, samples, reduction):
    model, x = made(name, samples)
    gradients = sample_gradients(model, [x])
    bound = 0.9 * median_norm(gradients)
    got = private_sum(model, [x], bound, reduction=reduction)
    assert_same(got, clipped_sum(gradients, bound))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["conv2d", "conv2d grouped", "transposed 1d", "transposed linear"])
def test_frozen_parameters_take_no_part(name, frozen):
    model, x = made(name, 5)
    getattr(model.layer, frozen).requires_grad_(False)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))


def spd(size):
    half = torch.randn(size, size, dtype=torch.float64)
    return Full(half @ half.T / size + torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("right", ["none", "columns", "columns and bias", "diagonal"])
@pytest.mark.parametrize("left", [False, True])
def test_factors_are_applied_to_the_uses_of_a_convolution(left, right):
    model, x = made("conv2d", 5)
    outputs, columns = model.layer.weight.flatten(1).shape
    rights = {
        "none": None,
        "columns": spd(columns),
        "columns and bias": spd(columns + 1),
        "diagonal": Diagonal(torch.rand(columns + 1, dtype=torch.float64) + 0.5),
    }
    sides = {"layer": Sides(spd(outputs) if left else None, rights[right])}
    gradients = [preconditioned(g, sides, model) for g in sample_gradients(model, [x])]
    bound = median_norm(gradients)
    got = private_sum(model, [x], bound, preconditioner=FixedSides(sides))
    assert_same(got, clipped_sum(gradients, bound))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_bias_that_is_trained_alone_is_preconditioned(repeated):
    model, x = made("conv2d", 5)
    model, layer = (model, "layer") if repeated else (nn.Sequential(model.layer), "0")
    bias = next(p for name, p in model.named_parameters() if name.endswith("bias"))
    model.requires_grad_(False)
    bias.requires_grad_()
    factor = spd(bias.numel())
    gradients = [
        {name: factor.dense() @ g for name, g in one.items()}
        for one in sample_gradients(model, [x])
    ]
    bound = median_norm(gradients)
    sides = FixedSides({layer: Sides(left=factor)})
    assert_same(private_sum(model, [x], bound, preconditioner=sides), clipped_sum(gradients, bound))


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_adds_nothing(name):
    model, x = made(name, 0)
    _, optimizer = private(model, 1.0)
    square(model(x)).sum().backward()
    optimizer.step()
    assert not any(g.any() for g in gradients_of(model).values())


@pytest.mark.parametrize("name", LAYERS)
def test_a_sample_that_is_not_finite_is_dropped(name):
    model, x = made(name, 5)
    wanted = private_sum(model, [x[1:]], 0.1)
    x[0] = torch.nan
    training, optimizer = private(model, 0.1)
    square(model(x)).sum().backward()
    optimizer.step()
    assert training.nonfinite_samples == 1
    assert_same(gradients_of(model), wanted)


def test_uses_on_images_of_different_sizes_are_added_up():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x):
            small = nn.functional.avg_pool2d(x, 2)
            return torch.cat([self.conv(x).flatten(1), self.conv(small).flatten(1)], 1)

    torch.manual_seed(0)
    model, x = Pyramid().double(), torch.randn(5, 2, 6, 4, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))


def test_a_model_with_parameters_of_its_own_can_be_a_part_twice():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = VisionTransformer()

        def forward(self, x):
            return self.tower(x) * self.tower(x.flip(-1))

    torch.manual_seed(0)
    model, x = Siamese().double(), torch.randn(5, 2, 4, 6, dtype=torch.float64)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))


@pytest.mark.parametrize("name", ["conv2d", "transposed 2d"])
def test_the_report_says_that_gradients_of_several_uses_are_stored(name):
    model, x = made(name, 5)
    training, _ = private(model, 1.0)
    square(model(x)).sum().backward()
    (layer,) = training.report().layers
    assert layer.formula == "stored" and layer.reason.startswith("3 uses in one forward pass")
    assert layer.flops > 4 * 5 * layer.parameters


def test_a_use_that_the_loss_does_not_depend_on_adds_nothing():
    class Unused(Repeated):
        def forward(self, x):
            self.layer(x * 3)
            return self.layer(x)

    model, x = made("conv2d", 5)
    model = Unused(model.layer)
    gradients = sample_gradients(model, [x])
    bound = median_norm(gradients)
    assert_same(private_sum(model, [x], bound), clipped_sum(gradients, bound))
