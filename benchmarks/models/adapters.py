"""Adapters of PEFT, on top of small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
from torch import nn

from benchmarks.models.case import Case, Inputs, first_output, pairs, tokens
from benchmarks.models.language import DECODER, ENCODER, T5, model

_GPT2 = model("GPT2", "LMHeadModel", **DECODER, n_embd=16, n_layer=2, n_head=2, n_positions=32)
_LLAMA = model("Llama", "ForCausalLM", **DECODER)
_BERT = model("Bert", "ForSequenceClassification", **ENCODER)
_T5 = model("T5", "ForConditionalGeneration", **T5)
_PROJECTIONS = ["q_proj", "v_proj"]


def _adapted(
    name: str,
    base: Callable[[], nn.Module],
    method: str,
    task: str,
    inputs: Callable[[int], Inputs] = tokens,
    refused: str = "",
    tolerance: float = 1e-9,
    note: str = "",
    **options: Any,
) -> Case:
    def build() -> nn.Module:
        config = getattr(peft, f"{method}Config")(task_type=task, **options)
        built: nn.Module = peft.get_peft_model(base(), config)
        return built

    return Case("Adapters (PEFT)", name, build, inputs, first_output, refused, note, tolerance)


def _llama(name: str, method: str, **options: Any) -> Case:
    return _adapted(name, _LLAMA, method, "CAUSAL_LM", **options)


def _projected(name: str, method: str, **options: Any) -> Case:
    return _llama(name, method, target_modules=_PROJECTIONS, **options)


def _gpt2(name: str, method: str, **options: Any) -> Case:
    return _adapted(f"{name} (GPT-2)", _GPT2, method, "CAUSAL_LM", **options)


def _bert(name: str, method: str, **options: Any) -> Case:
    return _adapted(f"{name} (BERT)", _BERT, method, "SEQ_CLS", **options)


def _t5(name: str, method: str, **options: Any) -> Case:
    return _adapted(f"{name} (T5)", _T5, method, "SEQ_2_SEQ_LM", inputs=pairs, **options)


_LORA: dict[str, Any] = {"r": 2, "init_lora_weights": False}

ADAPTERS = [
    _projected("LoRA", "Lora", **_LORA),
    _gpt2("LoRA", "Lora", target_modules=["c_attn"], fan_in_fan_out=True, **_LORA),
    _bert("LoRA", "Lora", target_modules=["query", "value"], **_LORA),
    _t5("LoRA", "Lora", target_modules=["q", "v"], **_LORA),
    _bert(
        "LoRA, all linear layers and biases",
        "Lora",
        target_modules="all-linear",
        bias="all",
        **_LORA,
    ),
    _llama("LoRA of an embedding", "Lora", target_modules=["embed_tokens", "q_proj"], **_LORA),
    _projected("LoRA and the head", "Lora", modules_to_save=["lm_head"], **_LORA),
    _projected("LoRA and new tokens", "Lora", trainable_token_indices=[3, 4], **_LORA),
    _projected("rsLoRA", "Lora", use_rslora=True, **_LORA),
    _projected("DoRA", "Lora", use_dora=True, r=2),
    _projected("AdaLoRA", "AdaLora", init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2),
    _llama(
        "IA3",
        "IA3",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    _gpt2(
        "IA3",
        "IA3",
        target_modules=["c_attn", "mlp.c_proj"],
        feedforward_modules=["mlp.c_proj"],
        fan_in_fan_out=True,
    ),
    _llama("Prompt tuning", "PromptTuning", num_virtual_tokens=4),
    _gpt2("Prompt tuning", "PromptTuning", num_virtual_tokens=4),
    _t5("Prompt tuning", "PromptTuning", num_virtual_tokens=4),
    _gpt2("P-tuning", "PromptEncoder", num_virtual_tokens=4, encoder_hidden_size=8),
    _bert("P-tuning", "PromptEncoder", num_virtual_tokens=4, encoder_hidden_size=8),
    _gpt2("Prefix tuning", "PrefixTuning", num_virtual_tokens=4),
    _llama(
        "Prefix tuning, projected",
        "PrefixTuning",
        num_virtual_tokens=4,
        prefix_projection=True,
        encoder_hidden_size=8,
    ),
    _projected("LoHa", "LoHa", r=2, init_weights=False),
    _projected("LoKr", "LoKr", r=2, init_weights=False),
    _projected("OFT", "OFT", oft_block_size=4, r=0, init_weights=False),
    _projected("BOFT", "BOFT", boft_block_size=4, init_weights=False),
    _projected("VeRA", "Vera", r=2, init_weights=False),
    _projected(
        "VB-LoRA",
        "VBLoRA",
        r=2,
        num_vectors=8,
        vector_length=4,
        topk=2,
        refused="share a parameter",
    ),
    _projected("FourierFT", "FourierFT", n_frequency=5),
    _projected("WaveFT", "WaveFT", n_frequency=6),
    _projected("HRA", "HRA", r=2),
    _projected("HiRA", "Hira", r=2),
    _projected("MiSS", "Miss", r=2),
    _projected("RandLoRA", "RandLora", r=2),
    _projected("C3A", "C3A", block_size=4, tolerance=1e-5, note="computes in float32"),
    _projected("SHiRA", "Shira", r=2),
    _projected("RoAd", "Road", group_size=8),
    _projected("DeLoRA", "Delora", r=2),
    _projected("GraLoRA", "Gralora", r=4, gralora_k=2),
    _llama("LN tuning", "LNTuning"),
    _bert("LN tuning", "LNTuning", target_modules=["LayerNorm"]),
    _bert("BEFT", "Beft"),
    _llama("Trainable tokens", "TrainableTokens", token_indices=[3, 4, 5]),
    _llama(
        "LLaMA-Adapter",
        "AdaptionPrompt",
        adapter_layers=2,
        adapter_len=4,
        refused="forward() replaced",
    ),
]
