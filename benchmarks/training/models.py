"""The models that training is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model, and a batch of inputs and classes for it.

    bounds: what a form may cost at most, as a multiple of plain SGD, where that is a target.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    bounds: dict[str, float]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and classes."""
        x = self.inputs()
        return x, torch.randint(CLASSES, (x.shape[0],))


class Block(nn.Module):
    """A transformer block: attention from plain linear layers, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, width]``."""
        batch, positions, width = x.shape
        shape = (batch, positions, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, positions, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Tokens and positions, blocks, the mean, a class."""

    def __init__(
        self, layers: int, width: int, positions: int, vocabulary: int = 1000, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, CLASSES]``."""
        # Indices for each sample, in memory of their own, because Opacus takes nothing else.
        places = torch.arange(x.shape[1], device=x.device).expand_as(x).contiguous()
        h = self.blocks(self.tokens(x) + self.positions(places))
        out: Tensor = self.head(self.norm(h).mean(1))
        return out


class LowRankUpdate(nn.Module):
    """A frozen linear layer plus a trained update of low rank (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[*, out_features]``."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def low_rank_transformer(rank: int = 8) -> nn.Module:
    """Return a frozen 12-layer transformer with low-rank updates and a trained head."""
    model = Transformer(12, 256, 64).requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.qkv = LowRankUpdate(block.qkv, rank)  # type: ignore[assignment]
        block.out = LowRankUpdate(block.out, rank)  # type: ignore[assignment]
    model.head.requires_grad_(True)
    return model


class Residual(nn.Module):
    """Two convolutions with GroupNorm and a way around them (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        same = inputs == outputs and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, outputs, H / stride, W / stride]``."""
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(h)) + self.around(x))


def resnet20() -> nn.Module:
    """Return ResNet-20 for 32 x 32 images, with GroupNorm."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16)]
    blocks.append(nn.ReLU())
    before = 16
    for width in (16, 32, 64):
        for index in range(3):
            blocks.append(Residual(before, width, 2 if index == 0 and width > 16 else 1))
            before = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(*blocks, *head)


def mlp(inputs: int = 784, width: int = 512) -> nn.Module:
    """Return ``inputs - width - width - CLASSES``."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def cnn() -> nn.Module:
    """Return two convolutions and two linear layers for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def tokens(batch: int, positions: int) -> Tensor:
    """Return random tokens ``[batch, positions]``."""
    return torch.randint(1000, (batch, positions))


WORKLOADS = [
    Workload(
        "MLP 784-512-512-10, batch 256",
        mlp,
        lambda: torch.randn(256, 784),
        {"DP-SGD": 1.25, "full rank": 2.1, "rank 64": 1.4},
    ),
    Workload(
        "CNN 16-32-128-10, batch 256",
        cnn,
        lambda: torch.randn(256, 1, 28, 28),
        {"DP-SGD": 1.25, "full rank": 1.45, "rank 64": 1.4},
    ),
    Workload(
        "transformer, 4 layers, d 256, 16 x 64",
        lambda: Transformer(4, 256, 64),
        lambda: tokens(16, 64),
        {"DP-SGD": 1.25, "full rank": 1.9, "rank 64": 1.4},
    ),
    Workload("ResNet-20, GroupNorm, batch 64", resnet20, lambda: torch.randn(64, 3, 32, 32), {}),
    Workload(
        "BERT-like, 12 layers, d 384, 8 x 64",
        lambda: Transformer(12, 384, 64, heads=6),
        lambda: tokens(8, 64),
        {},
    ),
    Workload(
        "LoRA rank 8, 12 layers, d 256, 16 x 64", low_rank_transformer, lambda: tokens(16, 64), {}
    ),
]
