"""Where modules keep parameters, and how others take their place for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Slots:
    """The places of some parameters: modules, and names of attributes of theirs.

    places: one for each parameter.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name) for module, name in places
        ]

    @classmethod
    def of(cls, module: nn.Module, paths: Iterable[str]) -> Slots:
        """Return the places of parameters of ``module`` and its children, by dotted paths."""
        split = [path.rpartition(".") for path in paths]
        return cls((module.get_submodule(owner), name) for owner, _, name in split)

    @classmethod
    def joined(cls, several: Iterable[Slots]) -> Slots:
        """Return the places of all of them, one after the other."""
        slots = cls(())
        slots._places = [place for one in several for place in one._places]
        return slots

    def values(self) -> list[Tensor]:
        """Return the parameters as the modules have them now: of shards, the whole."""
        return [slots[name] for slots, name in self._places]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the parameters be other tensors; all other parameters are left alone."""
        before = self.values()
        self._put(tensors)
        try:
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for (slots, name), tensor in zip(self._places, tensors, strict=True):
            slots[name] = tensor
