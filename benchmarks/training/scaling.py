"""How the cost of a step grows with the batch, the width and the length of sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.training.models import Transformer, Workload, mlp, tokens

FORMS = ("plain SGD", "DP-SGD", "full rank", "Opacus ghost")
_WIDTH, _LAYERS = 256, 2


@dataclass(frozen=True)
class Axis:
    """One thing that grows, and the workload at each size of it."""

    name: str
    sizes: tuple[int, ...]
    workload: Callable[[int], Workload]


def _mlp(inputs: int, width: int, batch: int) -> Workload:
    def model() -> nn.Module:
        return mlp(inputs, width)

    def data() -> Tensor:
        return torch.randn(batch, inputs)

    return Workload(f"MLP, width {width}, batch {batch}", model, data, {})


def _transformer(positions: int) -> Workload:
    # As many tokens in all, so that plain SGD costs about the same but for attention.
    batch = max(1, 2048 // positions)

    def model() -> nn.Module:
        return Transformer(_LAYERS, _WIDTH, positions)

    return Workload(f"{batch} x {positions} tokens", model, lambda: tokens(batch, positions), {})


AXES = (
    Axis(
        "batch (MLP 784-512-512-10)",
        (16, 32, 64, 128, 256, 512, 1024, 2048),
        lambda size: _mlp(784, 512, size),
    ),
    Axis(
        "width (MLP 784-n-n-10, batch 256)",
        (128, 256, 512, 1024, 2048),
        lambda size: _mlp(784, size, 256),
    ),
    Axis(
        "positions (transformer, 2 layers, d 256, 2048 tokens a batch)",
        (16, 32, 64, 128, 256, 512, 1024),
        _transformer,
    ),
)
