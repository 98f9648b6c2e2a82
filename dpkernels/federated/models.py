"""The models of the FedCEO paper."""

from __future__ import annotations

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
    """Return the paper's LeNet-5, 1.14 M parameters at 10 classes; records ``[N, 3, 32, 32]``."""
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
