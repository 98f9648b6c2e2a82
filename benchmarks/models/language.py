"""Language models: encoders, decoders, and both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models.case import (
    VOCABULARY,
    Case,
    Inputs,
    first_output,
    pairs,
    plain_tokens,
    tokens,
    without_dropout,
)

ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
}
DECODER: dict[str, Any] = ENCODER | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_BOTH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def model(kind: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a maker of transformers' class ``kind + head`` from ``kind + Config``."""

    def build() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**options)
        built: nn.Module = getattr(transformers, kind + head)(without_dropout(config))
        return built

    return build


def _encoder(name: str, kind: str, head: str, refused: str = "", **options: Any) -> Case:
    build = model(kind, head, **{k: v for k, v in (ENCODER | options).items() if v is not None})
    return Case("Encoders", name, build, tokens, first_output, refused)


def _decoder(name: str, kind: str, head: str = "ForCausalLM", **options: Any) -> Case:
    build = model(kind, head, **DECODER | options)
    return Case("Decoders", name, build, tokens, first_output)


def _both(name: str, kind: str, head: str = "ForConditionalGeneration", **options: Any) -> Case:
    build = model(kind, head, **_BOTH | options)
    return Case("Encoders and decoders", name, build, pairs, first_output)


def _t5(name: str, kind: str, **options: Any) -> Case:
    build = model(kind, "ForConditionalGeneration", **T5 | options)
    return Case("Encoders and decoders", name, build, pairs, first_output)


def _gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(**DECODER, head_dim=8, query_pre_attn_scalar=8)
    return transformers.Gemma3ForCausalLM(without_dropout(config))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**DECODER, num_local_experts=2, num_experts_per_tok=1)
    # The others multiply in float32 alone.
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(without_dropout(config))


def _ended(batch: int) -> Inputs:
    """Return sentences whose last token says that they end."""
    return {"input_ids": plain_tokens(batch)["input_ids"].index_fill(1, torch.tensor([8]), 2)}


_DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "max_relative_positions": 8,
    "pos_att_type": ["c2p", "p2c"],
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}

ENCODERS = [
    _encoder("BERT, classification", "Bert", "ForSequenceClassification"),
    _encoder("BERT, masked language model", "Bert", "ForMaskedLM"),
    _encoder("BERT, token classification", "Bert", "ForTokenClassification"),
    _encoder("RoBERTa, masked language model", "Roberta", "ForMaskedLM"),
    _encoder("RoBERTa, classification", "Roberta", "ForSequenceClassification"),
    _encoder("XLM-RoBERTa, classification", "XLMRoberta", "ForSequenceClassification"),
    _encoder(
        "DistilBERT, masked language model",
        "DistilBert",
        "ForMaskedLM",
        dim=16,
        hidden_dim=24,
        n_layers=2,
        n_heads=2,
    ),
    _encoder(
        "DistilBERT, classification",
        "DistilBert",
        "ForSequenceClassification",
        dim=16,
        hidden_dim=24,
        n_layers=2,
        n_heads=2,
    ),
    _encoder("ALBERT, masked language model", "Albert", "ForMaskedLM", embedding_size=8),
    _encoder("ELECTRA, discriminator", "Electra", "ForPreTraining", embedding_size=8),
    _encoder("ELECTRA, masked language model", "Electra", "ForMaskedLM", embedding_size=8),
    _encoder(
        "MPNet, masked language model", "MPNet", "ForMaskedLM", relative_attention_num_buckets=32
    ),
    _encoder("DeBERTa, classification", "Deberta", "ForSequenceClassification", **_DEBERTA),
    _encoder(
        "DeBERTa v2/v3, classification",
        "DebertaV2",
        "ForSequenceClassification",
        position_buckets=4,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        **_DEBERTA,
    ),
    _encoder(
        "DeBERTa v2/v3, masked language model",
        "DebertaV2",
        "ForMaskedLM",
        position_buckets=4,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        **_DEBERTA,
    ),
    _encoder(
        "ModernBERT, masked language model",
        "ModernBert",
        "ForMaskedLM",
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
    ),
    _encoder("ConvBERT, masked language model", "ConvBert", "ForMaskedLM", embedding_size=8),
    _encoder(
        "MobileBERT, masked language model",
        "MobileBert",
        "ForMaskedLM",
        "shares a parameter",
        embedding_size=16,
        intra_bottleneck_size=8,
        num_feedforward_networks=2,
    ),
    _encoder(
        "SqueezeBERT, classification", "SqueezeBert", "ForSequenceClassification", embedding_size=16
    ),
    _encoder("FNet, masked language model", "FNet", "ForMaskedLM", tpu_short_seq_length=9),
    _encoder(
        "Longformer, classification",
        "Longformer",
        "ForSequenceClassification",
        attention_window=[4, 4],
    ),
    _encoder(
        "BigBird, masked language model", "BigBird", "ForMaskedLM", attention_type="original_full"
    ),
    _encoder(
        "LayoutLM, token classification",
        "LayoutLM",
        "ForTokenClassification",
        max_2d_position_embeddings=16,
    ),
    _encoder(
        "Funnel, classification",
        "Funnel",
        "ForSequenceClassification",
        num_hidden_layers=None,
        block_sizes=[1, 1],
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=24,
    ),
    _encoder(
        "XLNet, language model",
        "XLNet",
        "LMHeadModel",
        "shares a parameter",
        max_position_embeddings=None,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=24,
    ),
    _encoder(
        "I-BERT, classification", "IBert", "ForSequenceClassification", "writes to this tensor"
    ),
    _encoder(
        "Nystromformer, masked language model",
        "Nystromformer",
        "ForMaskedLM",
        segment_means_seq_len=20,
        num_landmarks=20,
    ),
]
DECODERS = [
    _decoder("GPT-2", "GPT2", "LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32),
    _decoder(
        "GPT-Neo", "GPTNeo", num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4
    ),
    _decoder("GPT-NeoX (Pythia)", "GPTNeoX"),
    _decoder("GPT-J", "GPTJ", n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4),
    _decoder("GPT-BigCode", "GPTBigCode", n_embd=16, n_layer=2, n_head=2, n_positions=32),
    _decoder(
        "CodeGen",
        "CodeGen",
        n_embd=16,
        n_layer=2,
        n_head=4,
        num_attention_heads=4,
        n_positions=32,
        rotary_dim=4,
    ),
    _decoder("OPT", "OPT", ffn_dim=24, word_embed_proj_dim=16),
    _decoder("BLOOM", "Bloom", n_layer=2, n_head=2),
    _decoder("MPT", "Mpt", d_model=16, n_heads=2, n_layers=2, expansion_ratio=2, max_seq_len=32),
    _decoder("Falcon", "Falcon"),
    _decoder("Llama", "Llama"),
    _decoder("Mistral", "Mistral"),
    Case("Decoders", "Mixtral (experts)", _mixtral, tokens, first_output),
    _decoder("Qwen2", "Qwen2"),
    _decoder("Qwen3", "Qwen3", head_dim=8),
    _decoder("Gemma", "Gemma", head_dim=8),
    _decoder("Gemma 2", "Gemma2", head_dim=8, query_pre_attn_scalar=8),
    Case("Decoders", "Gemma 3", _gemma3, tokens, first_output),
    _decoder("Phi", "Phi"),
    _decoder("Phi-3", "Phi3"),
    _decoder("StableLM", "StableLm"),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("Granite", "Granite"),
    _decoder("SmolLM3", "SmolLM3"),
    _decoder("Mamba", "Mamba", state_size=4, conv_kernel=2, expand=2),
    _decoder("RWKV", "Rwkv", attention_hidden_size=16),
]
BOTH = [
    _t5("T5", "T5"),
    _t5("T5, gated (v1.1, Flan)", "T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _t5("mT5", "MT5"),
    _both("BART", "Bart"),
    Case(
        "Encoders and decoders",
        "BART, classification",
        model("Bart", "ForSequenceClassification", **_BOTH),
        _ended,
        first_output,
    ),
    _both("mBART", "MBart"),
    _both("Pegasus", "Pegasus"),
    _both("BlenderBot", "Blenderbot"),
    _both("M2M100 (NLLB)", "M2M100"),
    _both("Marian", "Marian", "MTModel"),
]
