"""Networks for the tests of merging, and what leaves their function alone."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn


def mlp(hidden: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(12, hidden),
        nn.Tanh(),
        nn.Linear(hidden, 5),
        nn.Identity(),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def convolutions(bias: bool = True) -> nn.Sequential:
    """Two convolutions, then linear layers, nested; records ``[2, 9, 8]``."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 5, 3, bias=bias), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Conv2d(5, 4, 2, bias=bias),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 7, bias=bias),
        nn.ReLU(),
        nn.Linear(7, 3, bias=bias),
    )


CASES = {
    "linear": (mlp, (12,)),
    "convolutions": (convolutions, (2, 9, 8)),
    "no biases": (lambda: convolutions(bias=False), (2, 9, 8)),
}


def built(make, seed: int) -> nn.Sequential:
    """Return the network in float64 with parameters of ``seed``, evaluating."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double().eval()


def layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def permuted(model: nn.Sequential, seed: int) -> nn.Sequential:
    """Return a copy with its hidden units in another order, made by slicing whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    chain = layers(model)
    with torch.no_grad():
        for layer, following in itertools.pairwise(chain):
            units = layer.weight.shape[0]
            order = torch.randperm(units, generator=generator)
            layer.weight.copy_(layer.weight[order])
            if layer.bias is not None:
                layer.bias.copy_(layer.bias[order])
            blocks = following.weight.chunk(units, dim=1)
            following.weight.copy_(torch.cat([blocks[unit] for unit in order], dim=1))
    return model


def widths(model: nn.Module) -> list[int]:
    return [layer.weight.shape[0] for layer in layers(model)]


def records(shape: tuple[int, ...], count: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64)
