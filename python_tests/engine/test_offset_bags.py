"""Bags of embeddings with offsets: each sample's tokens are its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    median_norm,
    private,
    private_sum,
    sample_gradients,
)

WORDS, WIDTH = 9, 3
LENGTHS = torch.tensor([2, 0, 5, 1, 3])


class Bags(nn.Module):
    """Texts, padded ``[B, T]`` and with lengths ``[B]``, as one vector of tokens with offsets."""

    def __init__(self, weighted=False, **options):
        super().__init__()
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, **options)
        self.last = nn.Linear(WIDTH, 2)
        self.weighted = weighted

    def forward(self, x, lengths):
        inside = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        tokens, offsets = x[inside], lengths.cumsum(0) - lengths
        if self.bags.include_last_offset:
            offsets = torch.cat([offsets, lengths.sum().view(1)])
        weights = tokens.to(self.bags.weight.dtype) / WORDS if self.weighted else None
        return self.last(self.bags(tokens, offsets, weights))


def example(**options):
    torch.manual_seed(0)
    model = Bags(**options).double()
    # A word twice in a text, and the same words in several.
    return model, (torch.randint(WORDS, (len(LENGTHS), int(LENGTHS.max()))) // 2, LENGTHS)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "sum", "weighted": True},
        {"mode": "mean", "padding_idx": 1},
        {"mode": "sum", "include_last_offset": True},
    ],
    ids=str,
)
def test_outputs_and_sums_are_those_of_single_samples(options):
    model, inputs = example(**options)
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))
    followed = copy.deepcopy(model)
    private(followed, bound)
    torch.testing.assert_close(followed(*inputs), model(*inputs))


def test_a_batch_without_tokens_has_gradients_of_the_other_layers():
    model, (x, lengths) = example(mode="sum")
    inputs = x, torch.zeros_like(lengths)
    gradients = sample_gradients(model, inputs)
    assert_same(private_sum(model, inputs, 1.0), clipped_sum(gradients, 1.0))


def test_bags_of_two_axes_are_followed_as_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH, mode="mean"), nn.Linear(WIDTH, 2)).double()
    inputs = (torch.randint(WORDS, (4, 5)),)
    gradients = sample_gradients(model, inputs)
    bound = median_norm(gradients)
    assert_same(private_sum(model, inputs, bound), clipped_sum(gradients, bound))


def test_more_bags_than_samples_are_refused():
    class Halves(Bags):
        def forward(self, x, lengths):
            return self.last(self.bags(x.flatten(), torch.arange(0, x.numel(), 2)))

    model = Halves(mode="sum").double()
    private(model, 1.0)
    with pytest.raises(RuntimeError, match="one bag for each"):
        model(torch.zeros(3, 4, dtype=torch.int64), torch.full((3,), 4))


@pytest.mark.parametrize("offsets", [[0, 3, 2], [1, 2, 3]])
def test_a_token_in_two_bags_or_in_none_is_refused(offsets):
    class Given(Bags):
        def forward(self, x, lengths):
            return self.last(self.bags(x.flatten(), torch.tensor(offsets)))

    model = Given(mode="sum").double()
    private(model, 1.0)
    with pytest.raises(RuntimeError, match="in one bag"):
        model(torch.zeros(3, 2, dtype=torch.int64), torch.full((3,), 2))
