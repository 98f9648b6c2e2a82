"""One record moves the released sum by no more than its bound, whatever cancels in its gradient.

No noise; every record is removed in turn. What is released is float32, so norms that were taken of
anything else (exact sums, gradients before they round) would bound nothing here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.engine import Unsupported
from python_tests.engine.oracle import private

BOUND = 0.5


class Difference(nn.Module):
    """Embeddings of two tokens, subtracted and enlarged: where both are one, nothing is left."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens, size = x[:, :2].long() % 6, x[:, 2:3]
        first, second = self.embedding(tokens).unbind(1)
        return self.head((first - second) * size + size.sign())


class Bag(nn.Module):
    """A bag whose weights cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 5, mode="sum"), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens, size = x[:, :1].long() % 6, x[:, 2:3]
        weights = torch.cat([size, -size, torch.ones_like(size)], 1)
        return self.head(self.bag(tokens.expand(-1, 3), per_sample_weights=weights))


class Tied(nn.Module):
    """A table that is also the output layer, whose two parts of the gradient are about opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 5)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens, size = x[:, :1].long() % 6, x[:, 2:3, None]
        own = self.embedding(tokens)
        scores = self.head(own)
        picked = scores.gather(2, tokens.unsqueeze(2))
        # d picked / d row = 2 own; taken away again, but for what float32 makes of it.
        return ((picked - own.square().sum(2, keepdim=True)) * size).flatten(1) + scores[:, 0]


class Positions(nn.Module):
    """A layer over positions that are all but equal, whose errors add up to all but nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        size = x[:, 2].view(-1, 1, 1)
        steps = torch.linspace(-1, 1, 30).view(1, 30, 1)
        rows = x[:, :1, None] + 1e-4 * steps * torch.linspace(1, 2, 40)
        if isinstance(self.layer, nn.Conv1d):
            y = self.layer(rows.mT).mT
        elif isinstance(self.layer, nn.GRU):
            y = self.layer(rows)[0]
        else:
            y = self.layer(rows)
        return (y * torch.sin(40 * steps) * size).sum(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedding": Difference,
    "bag": Bag,
    "tied": Tied,
    "linear": lambda: Positions(nn.Linear(40, 36)),
    "conv": lambda: Positions(nn.Conv1d(40, 36, 1)),
    "wide conv": lambda: Positions(nn.Conv1d(40, 36, 3, padding=1)),
    "layer norm": lambda: Positions(nn.LayerNorm(40)),
    "gru": lambda: Positions(nn.GRU(40, 12, batch_first=True)),
}


def released(model: nn.Module, microbatches: Sequence[Tensor]) -> Tensor:
    """Return the clipped sum of a step, float64."""
    own = copy.deepcopy(model)
    _, optimizer = private(own, BOUND)
    for x in microbatches:
        try:
            output = own(x)
        except Unsupported:
            reject()  # an output that is nothing but rounding, made large, looks like mixing
        output.flatten(1).sum(1).sum().backward()
    optimizer.step()
    return torch.cat([p.grad.double().flatten() for p in own.parameters()])


@pytest.mark.parametrize("name", MODELS)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    exponents=st.lists(st.integers(-3, 20), min_size=3, max_size=3),
    same=st.booleans(),
)
def test_no_record_moves_the_sum_beyond_its_bound(
    name: str, seed: int, batch: int, exponents: list[int], same: bool
) -> None:
    torch.manual_seed(seed)
    model = MODELS[name]()
    x = torch.randint(6, (batch, 3)).float()
    if same:
        x[:, 1] = x[:, 0]
    x[:, 2] = (torch.rand(batch) + 0.5) * 10.0 ** torch.tensor(exponents[:batch]).float()
    whole = released(model, [x])
    for b in range(batch):
        others = [x[torch.arange(batch) != b]] if batch > 1 else []
        moved = (whole - released(model, others)).norm().item()
        assert moved <= BOUND * (1 + 1e-6), f"{moved / BOUND:.9g} of the bound"


def test_a_record_among_thousands_of_microbatches() -> None:
    model = nn.Linear(1, 1, bias=False)
    # With all records, a float32 sum is above 1,024 from the first microbatch on, and in units u of
    # 2^-13, every pair that follows counts 1,001 - 1,000 of them. Without one of the first records
    # it is below, where units are half as large, and a pair counts next to nothing.
    u = 2.0**-13
    pair = [torch.tensor([[(1000.5 + 2.0**-6) * u]]), torch.tensor([[-(1000.5 - 2.0**-6) * u]])]
    first = torch.full((4096, 1), 0.25)
    whole = released(model, [first, *pair * 1500])
    moved = (whole - released(model, [first[1:], *pair * 1500])).norm().item()
    # The first 8 microbatches are added up in float32, and the sum comes as float32.
    assert moved <= 0.25 + 18 * 2.0**-24 * whole.norm().item()


def test_microbatches_add_up_to_the_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(40, 4)
    for count in (1, 7, 8, 9, 16, 17, 40):
        parts = list(x.tensor_split(count))
        # Sums come as float32, and are as good as that.
        together, apart = released(model, [x]).float(), released(model, parts).float()
        torch.testing.assert_close(apart, together)
