"""Small models of all kinds of layers, in float64, with records for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tokens(nn.Module):
    """Embedding - LSTM - attention - LayerNorm - Linear, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, 3]``."""
        x, _ = self.lstm(self.embedding(tokens))
        x, _ = self.attention(x, x, x)
        return self.head(self.norm(x).mean(1) * self.scale)


class Twice(nn.Module):
    """A linear layer that is called twice, and one at several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(3, 4)
        self.twice = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, 3]`` of ``[B, T, 3]``."""
        x = torch.tanh(self.positions(x)).mean(1)
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class Tied(nn.Module):
    """An embedding and an output layer with one weight, a layer between, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.between = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, 5]``."""
        return self.head(torch.tanh(self.between(self.embedding(tokens).mean(1))))


def linear(bias=True):
    torch.manual_seed(0)
    layers = nn.Linear(5, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3, bias=bias)
    return nn.Sequential(*layers).double(), torch.randn(6, 5).double()


def images(bias=True, groups=1, **geometry):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=bias, groups=groups, **geometry),
        nn.Tanh(),
        nn.Conv2d(4, 2, 2, bias=bias),
        nn.Flatten(),
        nn.LazyLinear(3, bias=bias),
    ).double()
    x = torch.randn(4, 2, 9, 8).double()
    model(x)
    return model, x


def other_images():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(2, 4, 2, stride=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(2),
        nn.Conv1d(4, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(3),
    ).double()
    x = torch.randn(3, 2, 3, 3).double()
    model(x)
    return model, x


def volumes():
    torch.manual_seed(0)
    layers = nn.Conv3d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)
    model = nn.Sequential(*layers).double()
    x = torch.randn(3, 2, 3, 3, 2).double()
    model(x)
    return model, x


def tokens():
    torch.manual_seed(0)
    return Tokens().double(), torch.randint(7, (5, 6))


def twice():
    torch.manual_seed(0)
    return Twice().double(), torch.randn(5, 4, 3).double()


def bias_alone():
    model, x = images()
    model[0].weight.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model, x


MODELS = {
    "linear": linear,
    "linear without biases": lambda: linear(bias=False),
    "images": images,
    "images without biases": lambda: images(bias=False),
    "strides and padding": lambda: images(stride=(2, 1), padding=(1, 2)),
    "dilation": lambda: images(dilation=(1, 2)),
    "reflected padding": lambda: images(padding=1, padding_mode="reflect"),
    "groups": lambda: images(groups=2),
    "transposed, norm, groups, one axis": other_images,
    "volumes": volumes,
    "tokens": tokens,
    "twice": twice,
    "biases alone": bias_alone,
}
