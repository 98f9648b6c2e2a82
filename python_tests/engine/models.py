"""Small models with every layer and option that has a rule, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and a batch of ``samples`` for it."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]


def images(channels: int, *size: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of batches ``[B, channels, *size]``."""
    return lambda samples: (torch.randn(samples, channels, *size, dtype=torch.float64),)


def vectors(*size: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of batches ``[B, *size]``."""
    return lambda samples: (torch.randn(samples, *size, dtype=torch.float64),)


def tokens(vocabulary: int, *size: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of batches of tokens ``[B, *size]``."""
    return lambda samples: (torch.randint(vocabulary, (samples, *size)),)


class Positions(nn.Module):
    """Token and position embeddings; positions as ``[T]`` or ``[1, T]``."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 6, padding_idx=2)
        self.places = nn.Embedding(9, 6)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, 6]``."""
        places = torch.arange(x.shape[1])
        return self.tokens(x) + self.places(places.unsqueeze(0) if self.rows else places)


class Tied(nn.Module):
    """A language model whose output layer has the embedding's weight."""

    def __init__(self, bias: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=padding)
        self.middle = nn.Linear(6, 6)
        self.output = nn.Linear(6, 11, bias=bias)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[B, T, 11]``."""
        return self.output(torch.tanh(self.middle(self.embedding(x))))


class TiedLinears(nn.Module):
    """Two linear layers with one weight and biases of their own, the first one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 5]``."""
        return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))


class Repeated(nn.Module):
    """Layers that are called several times in one forward pass, at different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.group = nn.GroupNorm(2, 4)
        self.embedding = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 4]``."""
        h = self.norm(self.linear(self.embedding(x))) + self.embedding(x.flip(1)[:, :1])
        h = self.norm(torch.tanh(self.linear(h))).mean(1)
        h = self.group(self.linear(h)) + self.group(h)
        return h


class Bag(nn.Module):
    """Bags of embeddings, weighted or not."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 5, **options)
        self.output = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 3]``."""
        return self.output(self.bag(x))


class Steps(nn.Module):
    """A recurrent cell in a loop over time, from a state that is given or not."""

    def __init__(self, cell: nn.Module, state: bool = False) -> None:
        super().__init__()
        self.cell, self.state = cell, state
        self.before = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last states of sequences ``[B, T, 4]``."""
        x = self.before(x)
        states = self._first(x) if self.state else None
        for step in x.unbind(1):
            states = self.cell(step, states)
        return torch.cat(states, 1) if isinstance(states, tuple) else states

    def _first(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = x.mean((1, 2)).unsqueeze(1).expand(-1, self.cell.hidden_size)
        return (h, h.cos()) if isinstance(self.cell, nn.LSTMCell) else h


def _convolution(rank: int, **options: object) -> Callable[[], nn.Module]:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    return lambda: nn.Sequential(kind(4, 6, 3, **options), nn.Tanh(), nn.Flatten(2))


def _transposed(rank: int, **options: object) -> Callable[[], nn.Module]:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    return lambda: nn.Sequential(kind(4, 6, 3, **options), nn.Tanh(), nn.Flatten(2))


CASES: dict[str, Case] = {
    "linear": Case(
        lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)), vectors(5)
    ),
    "linear without bias": Case(lambda: nn.Linear(5, 7, bias=False), vectors(5)),
    "linear 3-D": Case(
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), vectors(4, 5)
    ),
    "linear 4-D": Case(lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh()), vectors(2, 3, 5)),
    "conv1d": Case(_convolution(1, padding=2, dilation=2), images(4, 9)),
    "conv2d": Case(_convolution(2, stride=2, padding=1), images(4, 7, 6)),
    "conv2d grouped": Case(_convolution(2, groups=2), images(4, 5, 5)),
    "conv2d same": Case(_convolution(2, padding="same"), images(4, 5, 5)),
    "conv2d same, dilated": Case(_convolution(2, padding="same", dilation=2), images(4, 5, 5)),
    "conv2d circular": Case(_convolution(2, padding=1, padding_mode="circular"), images(4, 5, 5)),
    "conv2d reflect": Case(_convolution(2, padding=1, padding_mode="reflect"), images(4, 5, 5)),
    "conv3d": Case(_convolution(3, bias=False, padding=(0, 1, 1)), images(4, 4, 3, 5)),
    "transposed 1d": Case(_transposed(1, stride=2, padding=1, output_padding=1), images(4, 5)),
    "transposed 2d": Case(_transposed(2, stride=2, groups=2), images(4, 4, 3)),
    "transposed 3d": Case(_transposed(3, bias=False, dilation=2), images(4, 3, 2, 3)),
    "embedding": Case(
        lambda: nn.Sequential(nn.Embedding(7, 5, padding_idx=1), nn.Linear(5, 3)), tokens(7, 6)
    ),
    "embedding of one token": Case(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Tanh()), tokens(7)),
    "positions [T]": Case(lambda: nn.Sequential(Positions(False), nn.Linear(6, 3)), tokens(13, 9)),
    "positions [1, T]": Case(
        lambda: nn.Sequential(Positions(True), nn.Linear(6, 3)), tokens(13, 5)
    ),
    "bag, mean": Case(lambda: Bag(mode="mean", padding_idx=3), tokens(11, 4)),
    "bag, sum": Case(lambda: Bag(mode="sum"), tokens(11, 4)),
    "layer norm": Case(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)), vectors(4, 5)
    ),
    "layer norm over two axes": Case(
        lambda: nn.Sequential(nn.LayerNorm([4, 5]), nn.Tanh()), vectors(3, 4, 5)
    ),
    "layer norm without bias": Case(
        lambda: nn.Sequential(nn.LayerNorm(5, bias=False), nn.Tanh()), vectors(5)
    ),
    "rms norm": Case(lambda: nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6)), vectors(4, 5)),
    "group norm": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.Tanh()), images(2, 5, 5)
    ),
    "instance norm": Case(
        lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Tanh()), images(4, 5, 3)
    ),
    "tied": Case(Tied, tokens(11, 5)),
    "tied, bias and padding": Case(lambda: Tied(bias=True, padding=4), tokens(11, 5)),
    "tied linears": Case(TiedLinears, vectors(5)),
    "rnn cell": Case(lambda: Steps(nn.RNNCell(4, 5)), vectors(3, 4)),
    "rnn cell, relu and state": Case(
        lambda: Steps(nn.RNNCell(4, 5, bias=False, nonlinearity="relu"), state=True), vectors(3, 4)
    ),
    "gru cell": Case(lambda: Steps(nn.GRUCell(4, 5)), vectors(3, 4)),
    "gru cell and state": Case(lambda: Steps(nn.GRUCell(4, 5), state=True), vectors(3, 4)),
    "lstm cell": Case(lambda: Steps(nn.LSTMCell(4, 5)), vectors(3, 4)),
    "lstm cell and state": Case(lambda: Steps(nn.LSTMCell(4, 5), state=True), vectors(3, 4)),
    "repeated": Case(Repeated, tokens(7, 3)),
}


def made(name: str, samples: int = 7) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model in float64 and a batch, the same every time."""
    torch.manual_seed(0)
    case = CASES[name]
    return case.model().double(), case.inputs(samples)
