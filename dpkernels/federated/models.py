"""The models of the FedCEO and FedFisher papers."""

from __future__ import annotations

import itertools

from torch import Tensor, nn


def mlp(features: int, classes: int, hidden: int = 64) -> nn.Sequential:
    """Linear - dropout - ReLU - Linear without biases; records ``[N, ...]`` of ``features``."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, hidden, bias=False),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(hidden, classes, bias=False),
    )


def lenet5(classes: int) -> nn.Sequential:
    """Return FedCEO's LeNet-5, 1.14 M parameters at 10 classes; records ``[N, 3, 32, 32]``."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def lenet(classes: int) -> nn.Sequential:
    """Return FedFisher's LeNet, no biases: 44,190 parameters at 10 classes, ``[N, 1, 28, 28]``."""
    return nn.Sequential(
        *_pooled_convolutions(1, 6, 16), *_linear_layers(16 * 4 * 4, 120, 84, classes)
    )


def cnn5x5(classes: int) -> nn.Sequential:
    """Return FedFisher's CNN, no biases: 939,616 parameters at 10 classes, ``[N, 3, 32, 32]``.

    With biases it would have 940,362; that the paper's has none is in its code alone.
    """
    return nn.Sequential(
        *_pooled_convolutions(3, 32, 64), *_linear_layers(64 * 5 * 5, 512, 128, classes)
    )


def _pooled_convolutions(*channels: int) -> list[nn.Module]:
    """Return 5 x 5 convolutions without biases, each with ReLU and a max-pooling, then Flatten."""
    found: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(channels):
        found += [nn.Conv2d(inputs, outputs, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    return [*found, nn.Flatten()]


def _linear_layers(*widths: int) -> list[nn.Module]:
    """Return linear layers without biases, with ReLU between them."""
    found: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        found += [nn.Linear(inputs, outputs, bias=False), nn.ReLU()]
    return found[:-1]


class TokenLSTM(nn.Module):
    """Embedding - LSTM - Linear on the last hidden state; tokens int64 ``[N, T]``."""

    def __init__(self, vocabulary: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, ``[N, classes]``."""
        outputs, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(outputs[:, -1])
        return logits


def lstm(vocabulary: int, classes: int) -> TokenLSTM:
    """Return an LSTM with an embedding and a hidden state of 64."""
    return TokenLSTM(vocabulary, classes)
