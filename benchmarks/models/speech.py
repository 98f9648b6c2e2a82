"""Models of speech, of images and text together, and of time series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.models.case import VOCABULARY, Case, Inputs, first_output, pixels, tokens, waveforms
from benchmarks.models.language import ENCODER, model
from benchmarks.models.vision import TOWER

_WAV2VEC: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 3],
    "conv_stride": [4, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
    "feat_extract_norm": "layer",
}
_SEQUENCES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_target_positions": 12,
}
_WHISPER = _SEQUENCES | {
    "num_mel_bins": 4,
    "max_source_positions": 10,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
_TEXT = ENCODER | {"bos_token_id": 0, "eos_token_id": 2}
_TOWERS: dict[str, Any] = {"text_config": _TEXT, "vision_config": TOWER}


def _wav2vec(name: str, kind: str, head: str = "ForCTC", refused: str = "", **options: Any) -> Case:
    build = model(kind, head, **_WAV2VEC | options)
    return Case("Speech", name, build, waveforms(128), first_output, refused)


def _features(*shape: int) -> Callable[[int], Inputs]:
    return lambda batch: {
        "input_features": torch.randn(batch, *shape),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, 6)),
    }


def _texts_and_images(batch: int) -> Inputs:
    return tokens(batch) | pixels(8)(batch)


def _illustrated(batch: int) -> Inputs:
    """Return sentences that begin with the places of an image's four patches."""
    words = torch.randint(3, VOCABULARY - 2, (batch, 5))
    return pixels(8)(batch) | {
        "input_ids": torch.cat([torch.full((batch, 4), VOCABULARY - 1), words], 1)
    }


def _series(batch: int) -> Inputs:
    return {"past_values": torch.randn(batch, 16, 2)}


class Towers(nn.Module):
    """An image's tower and a text's, without the similarities of a whole batch."""

    def __init__(self, images: nn.Module, texts: nn.Module) -> None:
        super().__init__()
        self.images, self.texts = images, texts

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Any:
        """Return what each image has apart from its own text, ``[B, D]``."""
        texts = self.texts(input_ids=input_ids, attention_mask=attention_mask)
        return (_embedded(self.images(pixel_values=pixel_values)) - _embedded(texts),)


def _embedded(output: Any) -> Tensor:
    found: Tensor = output.pooler_output if "pooler_output" in output else output[0]
    return found


def _clip_towers() -> nn.Module:
    images = transformers.CLIPVisionConfig(projection_dim=8, **TOWER)
    texts = transformers.CLIPTextConfig(projection_dim=8, **_TEXT)
    return Towers(
        transformers.CLIPVisionModelWithProjection(images),
        transformers.CLIPTextModelWithProjection(texts),
    )


def _siglip_towers() -> nn.Module:
    return Towers(
        transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER)),
        transformers.SiglipTextModel(transformers.SiglipTextConfig(**_TEXT)),
    )


def _similarities(output: Any) -> Tensor:
    """Return what an image has to do with all texts of the batch."""
    logits: Tensor = output.logits_per_image
    return logits.square().sum(1)


_CLIP = model("CLIP", "Model", projection_dim=8, **_TOWERS)
_LLAVA = model(
    "Llava",
    "ForConditionalGeneration",
    text_config=_TEXT | {"model_type": "llama", "num_key_value_heads": 2, "pad_token_id": 0},
    vision_config=TOWER | {"model_type": "clip_vision_model"},
    image_token_index=VOCABULARY - 1,
    image_seq_length=4,
    vision_feature_layer=-1,
)
_BLIP = model(
    "Blip",
    "ForImageTextRetrieval",
    text_config=_TEXT | {"encoder_hidden_size": 16},
    vision_config=TOWER,
)
_PATCH_TST = model(
    "PatchTST",
    "ForPrediction",
    num_input_channels=2,
    context_length=16,
    patch_length=4,
    patch_stride=4,
    d_model=16,
    num_attention_heads=2,
    num_hidden_layers=2,
    ffn_dim=24,
    prediction_length=4,
    norm_type="layernorm",
    loss="mse",
)
_AST = model(
    "AST",
    "ForAudioClassification",
    **TOWER | {"frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8},
)

SPEECH = [
    _wav2vec("wav2vec 2.0, CTC", "Wav2Vec2"),
    _wav2vec("wav2vec 2.0, group norm", "Wav2Vec2", feat_extract_norm="group"),
    _wav2vec("wav2vec 2.0, classification", "Wav2Vec2", "ForSequenceClassification"),
    _wav2vec("HuBERT, CTC", "Hubert"),
    _wav2vec("WavLM, CTC", "WavLM"),
    _wav2vec("SEW, CTC", "SEW"),
    Case(
        "Speech",
        "Whisper",
        model("Whisper", "ForConditionalGeneration", **_WHISPER),
        _features(4, 20),
        first_output,
    ),
    Case(
        "Speech",
        "Speech2Text",
        model(
            "Speech2Text",
            "ForConditionalGeneration",
            input_feat_per_channel=4,
            conv_channels=8,
            max_source_positions=40,
            **_SEQUENCES,
        ),
        _features(20, 4),
        first_output,
    ),
    Case(
        "Speech",
        "AST",
        _AST,
        lambda batch: {"input_values": torch.randn(batch, 16, 8)},
        first_output,
    ),
]
TOGETHER = [
    Case("Images and text", "CLIP, towers", _clip_towers, _texts_and_images, first_output),
    Case("Images and text", "SigLIP, towers", _siglip_towers, _texts_and_images, first_output),
    Case(
        "Images and text",
        "CLIP, contrastive",
        _CLIP,
        _texts_and_images,
        _similarities,
        "mixes samples",
    ),
    Case("Images and text", "BLIP, retrieval", _BLIP, _texts_and_images, first_output),
    Case("Images and text", "LLaVA", _LLAVA, _illustrated, first_output),
    Case("Time series", "PatchTST", _PATCH_TST, _series, first_output),
]
