"""Modules with parameters of their own, as users write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """The usual hand-written one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x / rms(x) * weight``."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Scale(nn.Module):
    """``x * weight + bias`` with parameters of any shape that broadcasts."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is scaled and shifted."""
        return x * self.weight + self.bias


class Positions(nn.Module):
    """Tokens plus positions ``[1, T, D]``, more of which there are than needed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.places = nn.Parameter(torch.randn(1, 9, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, 6]``."""
        return torch.tanh(self.tokens(x) + self.places[:, : x.shape[1]])


class Lora(nn.Module):
    """A frozen linear layer and a trained product of low rank; B is zero, as at the start."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2, batched: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        """Return the base's output plus ``x A^T B^T``."""
        if self.batched:
            return self.base(x) + x @ self.a.mT @ self.b.mT
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b)


class Block(nn.Module):
    """Attention by hand, with hand-written norms and a layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.scale = nn.Parameter(torch.full((width,), 1e-4))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, D]``."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.scale * (torch.softmax(q @ k.mT, -1) @ v)


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, blocks, a head."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 7, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 3]`` of images ``[B, 2, 4, 6]``."""
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], 1) + self.places
        return self.head(self.blocks(self.dropout(h))[:, 0])


class Mean(nn.Module):
    """Scales by the mean of rows: of copies, it would be the mean over samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * mean(rows)``."""
        return x * self.rows.mean(0)


class Matrix(nn.Module):
    """A linear layer by hand, for which a weight has two axes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x matrix^T``."""
        return x @ self.matrix.t()


class Product(Matrix):
    """The same for which copies are matrices, too: right for ``[B, T, I]``, not for ``[B, I]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x matrix^T``."""
        return x @ self.matrix.mT


class Normalised(nn.Module):
    """Scales by a unit vector: the norm of copies would be that of all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * direction / |direction|``."""
        return x * self.direction / self.direction.norm()


class Leaky(nn.Module):
    """Scales by a weight and a trace of its mean: copies are almost apart, not quite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * (weight + mean(weight) / 10000)``."""
        return x * (self.weight + 1e-4 * self.weight.mean())


class Counted(nn.Module):
    """Divides by the number of rows, which copies have another one of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + weight / (number of rows)``."""
        return x + self.weight / self.weight.shape[0]


def between(module: nn.Module, before: int, after: int, outputs: int = 2) -> nn.Module:
    """Return ``module`` with linear layers around it, so that errors pass in both directions."""
    return nn.Sequential(
        nn.Linear(before, before), nn.Tanh(), module, nn.Tanh(), nn.Linear(after, outputs)
    )
