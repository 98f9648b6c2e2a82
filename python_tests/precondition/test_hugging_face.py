"""Hugging Face's own classes: outputs that are no tensors, masks, dropout, shared weights."""

from __future__ import annotations

import torch

from dpkernels.precondition import Kfac
from python_tests.engine.oracle import private
from python_tests.optional_packages import optional_package
from python_tests.precondition.factors import Fixed, cross_entropy

transformers = optional_package("transformers")
SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}


def bert():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=12,
        )
    )


def of_logits(outputs, targets):
    return cross_entropy(outputs.logits, targets)


def masked_tokens() -> Fixed:
    tokens, mask = torch.randint(2, 50, (6, 7)), torch.ones(6, 7, dtype=torch.int64)
    mask[3:, 4:] = 0
    return Fixed([tokens, mask], torch.randint(2, (6,)))


def test_bert_is_preconditioned_but_for_normalisation_and_dropout_plays_no_part():
    torch.manual_seed(0)
    model = bert()
    probe = masked_tokens()
    kfac = Kfac(model, probe, of_logits, batches=1, batch_size=6, sides="AG")
    private(model, 1.0, preconditioner=kfac)
    names = [name for name, module in model.named_modules() if "LayerNorm" in name]
    assert names and list(kfac.report().unpreconditioned) == names
    assert model.training and model.config.hidden_dropout_prob > 0
    before = kfac.sides("classifier").right.matrix
    torch.manual_seed(1)
    kfac.refresh()
    assert torch.equal(kfac.sides("classifier").right.matrix, before)


def test_gpt2_leaves_the_weight_that_it_shares_alone():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=12, **SIZES)
    model = transformers.GPT2LMHeadModel(config)
    probe = Fixed([torch.randint(2, 50, (6, 7))], torch.randint(50, (6,)))
    loss = lambda outputs, targets: cross_entropy(outputs.logits[:, -1], targets)  # noqa: E731
    kfac = Kfac(model, probe, loss, batches=1, batch_size=6, sides="AG")
    why = {layer.name: layer.why for layer in kfac.report().layers}
    assert why["lm_head"] == why["transformer.wte"] == "its weight is shared with another layer"
    assert kfac.sides("transformer.h.0.mlp.c_fc").describe() == "G full 64, A full 16"
    private(model, 1.0, preconditioner=kfac)
