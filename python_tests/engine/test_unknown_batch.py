"""What is common to all samples is told from samples, or refused where their number is unknown."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from python_tests.engine.models import Positions
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
from python_tests.engine.own_modules import Matrix, Scale

LENGTH = 9


@pytest.mark.parametrize("places", [torch.arange(LENGTH), torch.arange(LENGTH).unsqueeze(0)])
@pytest.mark.parametrize("samples", [4, LENGTH])
def test_positions_outside_of_a_call_of_the_model_are_refused(places, samples):
    model = Positions(rows=False).double()
    model.tokens.requires_grad_(False)
    private(model, 1.0)
    tokens = torch.randint(13, (samples, LENGTH))
    with pytest.raises(RuntimeError, match=r"places \(Embedding\).*call the model itself"):
        square(model.tokens(tokens) + model.places(places)).sum().backward()


@pytest.mark.parametrize("shape", [(5,), (1,), (1, 3)])
def test_indices_outside_of_a_call_that_may_be_positions_are_refused_by_their_shape(shape):
    model = nn.Sequential(nn.Embedding(7, 4))
    private(model, 1.0)
    for tokens in (torch.zeros(shape, dtype=torch.long), torch.randint(7, shape)):
        with pytest.raises(RuntimeError, match=r"0 \(Embedding\).*call the model itself"):
            model[0](tokens)


def test_tokens_outside_of_a_call_of_the_model_are_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4)).double()
    tokens = torch.randint(7, (5, 3))
    gradients = sample_gradients(model, (tokens,))
    bound = 0.9 * median_norm(gradients)
    _, optimizer = private(model, bound)
    square(model[0](tokens)).sum().backward()
    optimizer.step()
    assert_same(gradients_of(model), clipped_sum(gradients, bound))


class Shifted(nn.Module):
    """Samples plus a module's output for positions, which come first."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.own = nn.Parameter(torch.randn(4))

    def forward(self, places, x):
        return x + self.own * self.inner(places)


@pytest.mark.parametrize("inner", [nn.Tanh, lambda: Scale(4), lambda: Matrix(4, 4)])
@pytest.mark.parametrize("shape", [(1, 5, 4), (5, 4), (1, 1, 4)])
@pytest.mark.parametrize("samples", [3, 5])
def test_a_module_that_is_given_positions_first_is_refused(inner, shape, samples):
    model = nn.Sequential(Shifted(inner()))
    private(model, 1.0)
    with pytest.raises((RuntimeError, ValueError), match=r"0 \(Shifted\).*(sample|first axis)"):
        square(model[0](torch.randn(shape), torch.randn(samples, 5, 4))).sum().backward()


class Checkpointed(nn.Module):
    """Positions, and a linear layer inside or outside of the checkpoint."""

    def __init__(self, rows, whole):
        super().__init__()
        self.positions = Positions(rows)
        self.output = nn.Linear(6, 3)
        self.whole = whole

    def forward(self, x):
        if self.whole:
            return checkpoint(lambda x: self.output(self.positions(x)), x, use_reentrant=False)
        return self.output(checkpoint(self.positions, x, use_reentrant=False))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("samples", [4, LENGTH])
def test_positions_in_a_checkpoint_are_positions_when_they_are_computed_again(rows, whole, samples):
    torch.manual_seed(0)
    model = Checkpointed(rows, whole).double()
    tokens = torch.randint(13, (samples, LENGTH))
    gradients = sample_gradients(model, (tokens,))
    bound = median_norm(gradients)
    assert_same(private_sum(model, (tokens,), bound), clipped_sum(gradients, bound))
