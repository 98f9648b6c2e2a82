"""The models that ``dpkernels train`` knows, sized for the inputs of a data set.

None has BatchNorm, which mixes samples; GroupNorm and LayerNorm take its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpkernels.train.text import PAD, VOCABULARY

Shape = tuple[int, ...]


def logistic(shape: Shape, classes: int) -> nn.Module:
    """Return softmax regression on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Return two hidden layers of 128 with ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Return the paper's network for MNIST: 3 x 3 convolutions to 16 and 32, then 128, with ReLU.

    On 28 x 28 it is 1-16-32-1568-128-10.
    """
    channels, height, width = _image("cnn", shape)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def deep_cnn(shape: Shape, classes: int) -> nn.Module:
    """Return three stages of two 3 x 3 convolutions, 32, 64 and 128 wide, with GroupNorm."""
    channels, _, _ = _image("deep-cnn", shape)
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


class VisionTransformer(nn.Module):
    """Patches, learned positions, pre-norm transformer blocks, mean over positions.

    Input ``[B, C, H, W]``, output ``[B, classes]``.
    """

    def __init__(
        self, shape: Shape, classes: int, *, patch: int, width: int = 64, depth: int = 4
    ) -> None:
        super().__init__()
        channels, height, across = _image("vit", shape)
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        # An embedding, not a bare parameter: the engine has a rule for it.
        self.positions = nn.Embedding((height // patch) * (across // patch), width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x + self.positions(_places(x))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class _Block(nn.Module):
    """Attention with 4 heads, then a layer of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return ``[B, T, width]``; padding: ``[B, T]``, True where nothing is to be seen."""
        y = self.before_attention(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        mixed: Tensor = x + self.mlp(self.before_mlp(x))
        return mixed


def vit(shape: Shape, classes: int) -> nn.Module:
    """Return a small vision transformer of about 7 x 7 patches, or fewer on small images."""
    _, height, _ = _image("vit", shape)
    return VisionTransformer(shape, classes, patch=max(2, height // 7))


class TokenTransformer(nn.Module):
    """BERT in small: tokens, learned positions, pre-norm transformer blocks, a head on the first.

    Input ``[B, T]`` int64, a CLS token first, output ``[B, classes]``. Padding is not attended to.
    """

    def __init__(self, length: int, classes: int, *, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        padding = tokens == PAD
        x = self.tokens(tokens) + self.positions(_places(tokens))
        for block in self.blocks:
            x = block(x, padding)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def bert(shape: Shape, classes: int) -> nn.Module:
    """Return a small transformer over tokens: two blocks of width 64."""
    if len(shape) != 1:
        raise ValueError(
            f"model: bert takes texts as tokens [T], got inputs of shape {list(shape)}; take "
            "vit for images"
        )
    return TokenTransformer(shape[0], classes)


def _places(x: Tensor) -> Tensor:
    """Return 0 to T - 1 for every sample of ``[B, T, ...]``."""
    # In memory of their own: Opacus' ghost clipping takes no expanded tensor.
    return torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)


# Those that take texts as tokens; others take them as TF-IDF features.
TOKEN_MODELS = frozenset({"bert"})

MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "deep-cnn": deep_cnn,
    "vit": vit,
    "bert": bert,
}


def build(name: str, shape: Shape, classes: int) -> nn.Module:
    """Return the model of that name, with fresh parameters from torch's generator.

    Raises ValueError for a name that is not known, or a model that cannot take such inputs.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name](shape, classes)


def _image(model: str, shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise ValueError(
            f"model: {model} takes images [C, H, W] of at least 8 x 8, got inputs of shape "
            f"{list(shape)}; take logistic or mlp"
        )
    return shape[0], shape[1], shape[2]
