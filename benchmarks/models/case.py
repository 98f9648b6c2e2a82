"""One public model, small, with random weights and without dropout, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 40
# Longer than any batch of the table, so that no axis is as long as the batch by chance.
POSITIONS = 9

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on.

    family: the table's section. name: as its users call it.
    build: returns the model, of random weights.
    inputs: returns keyword arguments of the model for so many samples, samples first.
    loss: returns one loss for each sample from what the model returns.
    refused: part of the message, if the model is known to be refused.
    note: what the table says beside the result.
    tolerance: relative to the largest gradient; above 1e-9 only for a model that computes a part
        of itself in float32, whatever its parameters are.
    """

    family: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor]
    refused: str = ""
    note: str = ""
    tolerance: float = 1e-9


def first_output(output: Any) -> Tensor:
    """Return the mean square of the first output, ``[B]``: curved, so that errors matter."""
    found: Tensor = output[0]
    return found.flatten(1).square().mean(1)


def tokens(batch: int) -> Inputs:
    """Return sentences of several lengths, with the mask that says so."""
    lengths = POSITIONS - torch.arange(batch) % 3
    return {
        "input_ids": torch.randint(3, VOCABULARY, (batch, POSITIONS)),
        "attention_mask": (torch.arange(POSITIONS) < lengths.unsqueeze(1)).long(),
    }


def plain_tokens(batch: int) -> Inputs:
    """Return sentences of one length."""
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, POSITIONS))}


def pairs(batch: int) -> Inputs:
    """Return sentences and what a decoder is given."""
    return tokens(batch) | {"decoder_input_ids": torch.randint(3, VOCABULARY, (batch, 6))}


def pixels(size: int) -> Callable[[int], Inputs]:
    """Return a maker of square images of three channels."""
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def waveforms(length: int) -> Callable[[int], Inputs]:
    """Return a maker of mono sound."""
    return lambda batch: {"input_values": torch.randn(batch, length)}


def without_dropout(config: Any) -> Any:
    """Return the configuration with every rate of dropout at 0: masks differ between runs."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and "drop" in key:
            setattr(config, key, 0.0)
    return config
