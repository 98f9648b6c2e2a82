"""Sequences of tokens with the structure of text and no meaning."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from dpkernels.ops.checks import check_finite
from dpkernels.precondition.probes_synthetic import (
    Labels,
    Synthetic,
    check_labels,
    describe_labels,
    draw_labels,
)

Distribution = Literal["uniform", "zipf"]


class Tokens(Synthetic):
    """Random tokens between the special ones, of random length, with an attention mask.

    One sample is ``[cls] token ... token [sep] [pad] ...``, as in Algorithm 4 of DP-KFC; but its
    separator, which stands behind the last position that the mask keeps, is inside here.

    vocabulary: how many ids there are, special ones included; these are never drawn as tokens.
    length: of every sequence, with padding.
    classes: how many, uniform; or a function (size, generator) -> targets.
    distribution: of tokens: uniform, or ``zipf``: the k-th ordinary id with a probability in
        proportion to k^-exponent, which is for vocabularies that are sorted by frequency.
    cls, sep: ids at the beginning and the end; None: there is none.
    pad: id that fills up to ``length``; None: there is no padding, and all are ``length`` long.
    shortest: the fewest positions that are not padding; they are uniform from there to ``length``.
    mask: give the attention mask as a second input.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        classes: Labels,
        *,
        distribution: Distribution = "uniform",
        exponent: float = 1.0,
        cls: int | None = None,
        sep: int | None = None,
        pad: int | None = 0,
        shortest: int | None = None,
        mask: bool = True,
    ) -> None:
        special = [x for x in (cls, sep, pad) if x is not None]
        if any(not 0 <= x < vocabulary for x in special):
            raise ValueError(
                f"Tokens: cls, sep and pad must be ids in [0, {vocabulary}), got {special}"
            )
        if vocabulary <= len(set(special)):
            raise ValueError(
                f"Tokens: vocabulary must hold more than the {len(set(special))} special tokens, "
                f"got {vocabulary}"
            )
        if distribution not in get_args(Distribution):
            raise ValueError(f"Tokens: distribution must be uniform or zipf, got {distribution!r}")
        least = 1 + (cls is not None) + (sep is not None)
        shortest = least if shortest is None else shortest
        if not least <= shortest <= length:
            raise ValueError(
                f"Tokens: shortest must be in [{least}, length = {length}], which has room for one "
                f"token beside cls and sep, got {shortest}"
            )
        check_finite("Tokens", "exponent", exponent, at_least=0.0)
        check_labels("Tokens", classes)
        self.vocabulary, self.length, self.classes = vocabulary, length, classes
        self.distribution, self.exponent = distribution, exponent
        self.cls, self.sep, self.pad, self.shortest = cls, sep, pad, shortest
        self.mask = mask

    def describe(self) -> str:
        """Return distribution, lengths and targets."""
        lengths = f"{self.length}" if self.pad is None else f"{self.shortest} to {self.length}"
        return (
            f"{self.distribution} tokens of {self.vocabulary}, length {lengths}, "
            f"{describe_labels(self.classes)}"
        )

    def batch(self, size: int, generator: Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return ids ``[size, length]``, the mask (bool, True where no padding is), and targets."""
        device = generator.device
        ids = self._tokens(size, generator)
        lengths = torch.full((size, 1), self.length, device=device)
        if self.pad is not None:
            lengths = torch.randint(
                self.shortest, self.length + 1, (size, 1), generator=generator, device=device
            )
        if self.cls is not None:
            ids[:, 0] = self.cls
        if self.sep is not None:
            ids.scatter_(1, lengths - 1, self.sep)
        mask = torch.arange(self.length, device=device) < lengths
        if self.pad is not None:
            ids.masked_fill_(~mask, self.pad)
        targets = draw_labels(self.classes, size, generator)
        return (ids, mask) if self.mask else (ids,), targets

    def _tokens(self, size: int, generator: Generator) -> Tensor:
        """Return ordinary ids ``[size, length]``."""
        shape, device = (size, self.length), generator.device
        ordinary = self._ordinary.to(device)
        if self.distribution == "uniform":
            ranks = torch.randint(len(ordinary), shape, generator=generator, device=device)
        else:
            # By the inverse of the distribution function, in float64: there are many rare tokens.
            uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
            ranks = torch.searchsorted(self._cumulative.to(device), uniform, right=True)
            ranks.clamp_(max=len(ordinary) - 1)
        return ordinary[ranks]

    @cached_property
    def _ordinary(self) -> Tensor:
        """The ids that are not special."""
        keep = torch.ones(self.vocabulary, dtype=torch.bool)
        for special in (self.cls, self.sep, self.pad):
            if special is not None:
                keep[special] = False
        return keep.nonzero().squeeze(1)

    @cached_property
    def _cumulative(self) -> Tensor:
        """Probability of the first k ordinary ids, float64."""
        ranks = torch.arange(1, len(self._ordinary) + 1, dtype=torch.float64)
        weights = ranks**-self.exponent
        return (weights / weights.sum()).cumsum(0)
