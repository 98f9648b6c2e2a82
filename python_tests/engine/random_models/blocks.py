"""Block kinds that keep samples apart: each maps states ``[B, T, F]`` to such, given tokens too.

``ORDINARY`` kinds must train: refusing one is a failure. Those of ``BY_POSITION`` may be refused:
their layers see no axis of samples.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

F = 4  # features of a state
VOCABULARY = 12


class Of(nn.Module):
    """A block from a module and what is done with it: ``use(module, states, tokens)``."""

    def __init__(self, use: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.use = use

    def forward(self, h: Tensor, tokens: Tensor) -> Tensor:
        return self.use(*self.parts, h, tokens)


def on_states(module: nn.Module) -> Of:
    return Of(lambda m, h, tokens: m(h), module)


def on_channels(module: nn.Module) -> Of:
    """Channels second, as convolutions want them."""
    return Of(lambda m, h, tokens: m(h.mT).mT, module)


class Own(nn.Module):
    """A user's module with a parameter, used by a function of states and parameter."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(shape))
        self.use = use

    def forward(self, h: Tensor) -> Tensor:
        return self.use(h, self.weight)


class Lora(nn.Module):
    """A frozen layer plus a trained product of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(F, F).requires_grad_(False)
        self.down, self.up = nn.Linear(F, 2, bias=False), nn.Linear(2, F, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.base(h) + self.up(self.down(h))


class Steps(nn.Module):
    """A recurrent cell over the positions."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, h: Tensor) -> Tensor:
        state, states = None, []
        for x in h.unbind(1):
            state = self.cell(x, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


class FrozenBatchNorm(nn.Module):
    """BatchNorm in evaluation mode: a fixed scale, which mixes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(F).requires_grad_(False).eval()
        self.head = nn.Linear(F, F)

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, h: Tensor) -> Tensor:
        return self.head(self.norm(h.mT).mT)


class Tied(nn.Module):
    """A table that is its own head: scores of tokens, and tokens by scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, F), nn.Linear(F, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.back = nn.Linear(VOCABULARY, F)

    def forward(self, h: Tensor, tokens: Tensor) -> Tensor:
        return self.back(torch.tanh(self.head(h + self.table(tokens))))


class Differences(nn.Module):
    """Differences of rows of a table, and of a layer's outputs, which cancel for equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(VOCABULARY, F), nn.Linear(F, F)

    def forward(self, h: Tensor, tokens: Tensor) -> Tensor:
        rows = self.table(tokens) - self.table(tokens.flip(1))
        return self.layer(rows * h) - self.layer(h.flip(1))


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: on_states(nn.Linear(F, F)),
    "linear without bias": lambda: on_states(nn.Linear(F, F, bias=False)),
    "wide linear": lambda: on_states(nn.Sequential(nn.Linear(F, 40), nn.ReLU(), nn.Linear(40, F))),
    "conv1d": lambda: on_channels(nn.Conv1d(F, F, 3, padding=1)),
    "grouped conv1d": lambda: on_channels(nn.Conv1d(F, F, 3, padding=1, groups=2)),
    "transposed conv1d": lambda: on_channels(nn.ConvTranspose1d(F, F, 3, padding=1)),
    "conv2d": lambda: Of(
        lambda m, h, tokens: m(h.unsqueeze(1)).mean(1), nn.Conv2d(1, 3, 3, padding=1)
    ),
    "embedding": lambda: Of(lambda m, h, tokens: h + m(tokens), nn.Embedding(VOCABULARY, F)),
    "embedding with padding": lambda: Of(
        lambda m, h, tokens: h * m(tokens), nn.Embedding(VOCABULARY, F, padding_idx=1)
    ),
    "embedding bag": lambda: Of(
        lambda m, h, tokens: h + m(tokens).unsqueeze(1), nn.EmbeddingBag(VOCABULARY, F, mode="sum")
    ),
    "tied embedding and linear": Tied,
    "layer norm": lambda: on_states(nn.LayerNorm(F)),
    "rms norm": lambda: on_states(nn.RMSNorm(F)),
    "group norm": lambda: on_channels(nn.GroupNorm(2, F)),
    "instance norm": lambda: on_channels(nn.InstanceNorm1d(F, affine=True)),
    "attention": lambda: Of(
        lambda m, h, tokens: m(h, h, h, need_weights=False)[0],
        nn.MultiheadAttention(F, 2, batch_first=True),
    ),
    "transformer layer": lambda: on_states(
        nn.TransformerEncoderLayer(F, 2, 8, dropout=0.0, batch_first=True)
    ),
    "rnn": lambda: Of(lambda m, h, tokens: m(h)[0], nn.RNN(F, F, batch_first=True)),
    "gru": lambda: Of(lambda m, h, tokens: m(h)[0], nn.GRU(F, F, batch_first=True)),
    "lstm": lambda: Of(lambda m, h, tokens: m(h)[0], nn.LSTM(F, F, batch_first=True)),
    "rnn cell": lambda: on_states(Steps(nn.RNNCell(F, F))),
    "gru cell": lambda: on_states(Steps(nn.GRUCell(F, F))),
    "lstm cell": lambda: on_states(Steps(nn.LSTMCell(F, F))),
    "bare scale": lambda: on_states(Own(lambda h, w: h * w, F)),
    "bare matrix, vmap": lambda: on_states(Own(lambda h, w: torch.tanh(h @ (w @ w.mT)), F, F)),
    "called twice": lambda: Of(lambda m, h, tokens: m(torch.tanh(m(h))) - m(h), nn.Linear(F, F)),
    "checkpoint": lambda: Of(
        lambda m, h, tokens: checkpoint(m, h, use_reentrant=False),
        nn.Sequential(nn.Linear(F, F), nn.Tanh(), nn.LayerNorm(F)),
    ),
    "residual": lambda: Of(lambda m, h, tokens: h + torch.tanh(m(h)), nn.Linear(F, F)),
    "dropout": lambda: on_states(nn.Sequential(nn.Dropout(0.0), nn.Linear(F, F))),
    "cancelling differences": Differences,
    "low rank adapter": lambda: on_states(Lora()),
}

# Positions, the same for all samples: [T], [1, T], [T, F], [1, T, F].
BY_POSITION: dict[str, Callable[[int], nn.Module]] = {
    "positions [T]": lambda t: Of(
        lambda m, h, tokens: h + m(torch.arange(h.shape[1])), nn.Embedding(t, F)
    ),
    "positions [1, T]": lambda t: Of(
        lambda m, h, tokens: h + m(torch.arange(h.shape[1]).unsqueeze(0)), nn.Embedding(t, F)
    ),
    "shifted positions [T]": lambda t: Of(
        lambda m, h, tokens: h + m(torch.arange(h.shape[1]) + 2), nn.Embedding(t + 2, F)
    ),
    "bare positions [1, T, F]": lambda t: on_states(Own(lambda h, w: h + w, 1, t, F)),
    "bare positions [T, F]": lambda t: on_states(Own(lambda h, w: h + w, t, F)),
    "linear of fixed features [T, F]": lambda t: Of(
        lambda m, h, tokens: h + m(torch.ones(h.shape[1], F, dtype=h.dtype)), nn.Linear(F, F)
    ),
    "layer norm of fixed features [T, F]": lambda t: Of(
        lambda m, h, tokens: h * m(torch.ones(h.shape[1], F, dtype=h.dtype).cumsum(1)),
        nn.LayerNorm(F),
    ),
    "frozen batch norm": lambda t: on_states(FrozenBatchNorm()),
}
