"""Every model is one that the engine trains privately."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from dpkernels import make_private
from dpkernels.train.models import MODELS, build


def test_the_cnn_is_the_papers():
    sizes = [p.numel() for p in build("cnn", (1, 28, 28), 10).parameters()]
    assert sizes == [144, 16, 4608, 32, 1568 * 128, 128, 1280, 10]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)], ids=str)
def test_every_parameter_gets_a_clipped_gradient(name, shape):
    torch.manual_seed(0)
    model = build(name, shape, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match="adds no noise"):
        make_private(
            model,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=1e-3,
            expected_batch_size=1,
            loss_reduction="sum",
        )
    logits = model(torch.randn(3, *shape))
    assert logits.shape == (3, 10)
    cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="sum").backward()
    optimizer.step()
    total = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    assert all(p.grad.any() for p in model.parameters())
    # Three samples of norm C at most, each with a relative 1e-6 for rounding.
    assert total.norm() <= 3e-3 * (1 + 1e-6)


def test_models_of_images_refuse_vectors():
    with pytest.raises(ValueError, match=r"cnn takes images .* got inputs of shape \[123\]"):
        build("cnn", (123,), 2)
    with pytest.raises(ValueError, match="model must be one of logistic, mlp"):
        build("resnet", (1, 28, 28), 10)
