"""Hugging Face's own classes, built from a configuration, need nothing changed."""

from __future__ import annotations

import pytest
import torch

from python_tests.engine.oracle import (
    assert_same,
    clipped_sum,
    median_norm,
    private_sum,
    sample_gradients,
    square,
)
from python_tests.optional_packages import optional_package

transformers = optional_package("transformers")


def logits(output):
    return square(output.logits)


def bert():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=12,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=12,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


@pytest.mark.parametrize("make", [bert, gpt2])
def test_clipped_sums_are_those_of_single_samples(make):
    torch.manual_seed(0)
    model = make().double()
    tokens = torch.randint(2, 50, (5, 7))
    gradients = sample_gradients(model, (tokens,), logits)
    bound = median_norm(gradients)
    assert_same(private_sum(model, (tokens,), bound, loss=logits), clipped_sum(gradients, bound))


def test_gpt2_shares_its_embedding_with_its_output():
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
