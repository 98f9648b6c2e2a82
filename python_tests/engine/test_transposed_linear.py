"""``Conv1D`` as in GPT-2 of transformers: a linear layer with its weight as [inputs, outputs]."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels.engine import Unsupported
from dpkernels.ops.factor import Diagonal, Full
from dpkernels.precondition import FixedSides, Sides
from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    median_norm,
    private,
    private_sum,
    sample_gradients,
    square,
)


class Conv1D(nn.Module):
    """The class of ``transformers.pytorch_utils``, as it behaves."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], self.nf)


def made(samples=5, *positions):
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(3, 6)).double()
    return model, torch.randn(samples, *positions, 4, dtype=torch.float64)


@pytest.mark.parametrize(("samples", "reduction"), [(1, "sum"), (5, "sum"), (5, "mean")])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias"])
@pytest.mark.parametrize("positions", [(), (3,), (20,), (2, 3)])
def test_clipped_sums_are_those_of_single_samples(samples, positions, frozen, reduction):
    model, x = made(samples, *positions)
    if frozen != "nothing":
        getattr(model[0], frozen).requires_grad_(False)
    gradients = sample_gradients(model, [x])
    bound = 0.9 * median_norm(gradients)
    got = private_sum(model, [x], bound, reduction=reduction)
    assert_same(got, clipped_sum(gradients, bound))


@pytest.mark.parametrize("positions", [(), (3,), (20,)])
@pytest.mark.parametrize("which", ["left", "right", "both"])
def test_factors_act_on_outputs_and_inputs_as_for_a_linear_layer(which, positions):
    model, x = made(5, *positions)
    half = torch.randn(6, 6, dtype=torch.float64)
    left = Full(half @ half.T) if which != "right" else None
    right = Diagonal(torch.rand(4, dtype=torch.float64) + 0.5) if which != "left" else None
    gradients = sample_gradients(model, [x])
    for one in gradients:
        if left is not None:
            one["0.weight"] = one["0.weight"] @ left.dense()
            one["0.bias"] = left.dense() @ one["0.bias"]
        if right is not None:
            one["0.weight"] = right.dense() @ one["0.weight"]
    bound = median_norm(gradients)
    sides = FixedSides({"0": Sides(left, right)})
    assert_same(private_sum(model, [x], bound, preconditioner=sides), clipped_sum(gradients, bound))


@pytest.mark.parametrize(
    "sides", [Sides(left=Diagonal(torch.ones(4))), Sides(right=Diagonal(torch.ones(5)))]
)
def test_factors_must_fit(sides):
    model, _ = made()
    with pytest.raises(ValueError, match=r"0 \(Conv1D\): (left|right) must be of size"):
        private(model, 1.0, preconditioner=FixedSides({"0": sides}))


def test_only_the_class_of_transformers_has_the_rule():
    class Other(Conv1D):
        pass

    Other.__name__ = "Conv1D"
    Other.__module__ = "somewhere.else"
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(3, 4), Other(2, 3)).double()
    training, _ = private(model, 1.0)
    square(model(torch.randn(5, 4, dtype=torch.float64))).sum().backward()
    assert [layer.rule for layer in training.report().layers] == ["transposed linear", "vmap"]


def test_weight_shared_with_a_linear_layer_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(Unsupported, match=r"0 \(Conv1D\) and 1 \(Linear\)"):
        private(model, 1.0)
