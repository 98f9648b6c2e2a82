"""Every model is one that the engine trains privately."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from dpkernels import make_private
from dpkernels.train.models import MODELS, TOKEN_MODELS, build
from dpkernels.train.text import CLS, PAD, hashed_tokens


def test_the_cnn_is_the_papers():
    sizes = [p.numel() for p in build("cnn", (1, 28, 28), 10).parameters()]
    assert sizes == [144, 16, 4608, 32, 1568 * 128, 128, 1280, 10]


IMAGES = [torch.randn(3, *shape) for shape in [(1, 8, 8), (3, 32, 32)]]
TOKENS = hashed_tokens(["a b c", "d e f", "g h i"], length=4)
CASES = [(name, x) for name in MODELS for x in ([TOKENS] if name in TOKEN_MODELS else IMAGES)]


@pytest.mark.parametrize(("name", "inputs"), CASES, ids=lambda x: str(getattr(x, "shape", x)))
def test_every_parameter_gets_a_clipped_gradient(name, inputs):
    torch.manual_seed(0)
    model = build(name, tuple(inputs.shape[1:]), 10)
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
    logits = model(inputs)
    assert logits.shape == (3, 10)
    cross_entropy(logits, torch.tensor([0, 1, 2]), reduction="sum").backward()
    optimizer.step()
    total = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    assert all(p.grad.any() for p in model.parameters())
    # Three samples of norm C at most, each with a relative 1e-6 for rounding.
    assert total.norm() <= 3e-3 * (1 + 1e-6)
    # Under Poisson sampling nobody may be drawn.
    optimizer.zero_grad()
    cross_entropy(model(inputs[:0]), torch.tensor([]).long(), reduction="sum").backward()
    optimizer.step()
    assert not any(p.grad.any() for p in model.parameters())


def test_bert_does_not_see_padding():
    torch.manual_seed(0)
    model = build("bert", (7,), 2).double()
    words = [CLS, 5, 9, 4]
    short = model(torch.tensor([words]))
    padded = model(torch.tensor([[*words, PAD, PAD, PAD]]))
    # Sums of other lengths and orders: a few float64 roundings, each 1e-16 of numbers about 1.
    torch.testing.assert_close(short, padded, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(short, model(torch.tensor([[CLS, 9, 5, 4]])), rtol=1e-6, atol=1e-6)


def test_bert_learns_which_word_is_in_a_text_it_has_not_seen():
    torch.manual_seed(0)
    labels = torch.randint(2, (400,))
    # Any of 30 words, and one of two that tell, at any place.
    texts = torch.randint(10, 40, (400, 8))
    texts[torch.arange(400), torch.randint(1, 8, (400,))] = 50 + labels
    texts[:, 0] = CLS
    model = build("bert", (8,), 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with pytest.warns(UserWarning, match="adds no noise"):
        make_private(
            model,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=100,
            loss_reduction="sum",
        )
    for step in range(60):
        at = slice(100 * (step % 3), 100 * (step % 3) + 100)
        cross_entropy(model(texts[at]), labels[at], reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    right = int((model(texts[300:]).argmax(1) == labels[300:]).sum())
    # Guessing has mean 50 of 100 and standard deviation 5.
    assert right > 80


def test_models_refuse_inputs_of_another_kind():
    with pytest.raises(ValueError, match=r"bert takes texts as tokens \[T\], got .* \[1, 8, 8\]"):
        build("bert", (1, 8, 8), 10)
    with pytest.raises(ValueError, match=r"cnn takes images .* got inputs of shape \[123\]"):
        build("cnn", (123,), 2)
    with pytest.raises(ValueError, match="model must be one of logistic, mlp"):
        build("resnet", (1, 28, 28), 10)
