"""Models of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dpkernels
from benchmarks.models.case import Case, Inputs, first_output, pixels
from benchmarks.models.language import model

TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
_SWIN: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "mlp_ratio": 2.0,
}
_TWO_STAGES: dict[str, Any] = {"hidden_sizes": [8, 8], "depths": [1, 1]}
_CONVNEXT = _TWO_STAGES | {"num_stages": 2, "patch_size": 4}
_RESNET = _TWO_STAGES | {"embedding_size": 8, "layer_type": "basic"}
_PYRAMID = _TWO_STAGES | {"num_encoder_blocks": 2, "mlp_ratios": [2, 2]}
_BATCH_NORM = "normalises over the batch"


def _case(
    name: str,
    kind: str,
    head: str = "ForImageClassification",
    size: int = 8,
    refused: str = "",
    **options: Any,
) -> Case:
    build = model(kind, head, **options)
    return Case("Images", name, build, pixels(size), first_output, refused)


def _group_norm() -> nn.Module:
    return dpkernels.batch_norm_to_group_norm(
        model("ResNet", "ForImageClassification", **_RESNET)()
    )


def _masked(batch: int) -> Inputs:
    """Return images, and the random numbers that say which patches are masked."""
    return pixels(8)(batch) | {"noise": torch.rand(batch, 4)}


def _latents(batch: int) -> Inputs:
    return {"inputs": torch.randn(batch, 9, 16)}


_MAE = model("ViTMAE", "Model", mask_ratio=0.5, **TOWER)
_PERCEIVER = model(
    "Perceiver",
    "Model",
    d_model=16,
    num_latents=4,
    d_latents=16,
    num_blocks=1,
    num_self_attends_per_block=2,
    num_self_attention_heads=2,
    num_cross_attention_heads=2,
)

IMAGES = [
    _case("ViT", "ViT", **TOWER),
    _case("DeiT", "DeiT", **TOWER),
    _case("BEiT", "Beit", **TOWER),
    _case("BEiT, relative positions", "Beit", use_relative_position_bias=True, **TOWER),
    _case("Data2Vec", "Data2VecVision", use_relative_position_bias=True, **TOWER),
    _case("DINOv2", "Dinov2", **TOWER),
    _case("ViT-MSN", "ViTMSN", **TOWER),
    Case("Images", "MAE", _MAE, _masked, first_output),
    _case("YOLOS", "Yolos", "Model", **TOWER | {"image_size": [8, 8], "num_detection_tokens": 3}),
    _case("Swin", "Swin", size=16, **_SWIN),
    _case("Swin, absolute positions", "Swin", size=16, use_absolute_embeddings=True, **_SWIN),
    _case("Swin v2", "Swinv2", size=16, **_SWIN),
    _case("ConvNeXt", "ConvNext", size=32, **_CONVNEXT),
    _case("ConvNeXt v2", "ConvNextV2", size=32, **_CONVNEXT),
    _case(
        "SegFormer",
        "Segformer",
        size=32,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[3, 3],
        strides=[2, 2],
        **_PYRAMID,
    ),
    _case(
        "PVT",
        "Pvt",
        size=32,
        image_size=32,
        num_attention_heads=[1, 2],
        sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2],
        strides=[4, 2],
        **_PYRAMID,
    ),
    Case("Images", "Perceiver", _PERCEIVER, _latents, first_output),
    _case("ResNet", "ResNet", size=16, refused=_BATCH_NORM, **_RESNET),
    Case("Images", "ResNet, group norm", _group_norm, pixels(16), first_output),
    _case("MobileNet v2", "MobileNetV2", size=32, refused=_BATCH_NORM, depth_multiplier=0.25),
]
