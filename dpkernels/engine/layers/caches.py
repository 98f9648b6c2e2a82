"""Caches of keys and values (transformers), which modules are given, change and return.

A training pass has no use for them, but models make them unless they are told not to. Tensors in a
cache belong to no output that a rule could follow. So a repeated pass gets the cache as it was
before the first, and gradients that come through a returned cache are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_cache(x: Any) -> bool:
    """Return whether ``x`` is one of transformers' caches."""
    return any(
        kind.__name__ == "Cache" and kind.__module__.startswith("transformers.")
        for kind in type(x).__mro__
    )


def as_it_is(cache: Any) -> Any:
    """Return a copy that shares the tensors, and that changes of the cache do not reach."""
    return _rebuilt(cache, lambda x: x, in_place=False)


def guard(cache: Any, owner: str) -> None:
    """Refuse gradients that come through tensors of a cache from now on."""

    def refuse(gradient: Tensor) -> None:
        raise RuntimeError(
            f"{owner}: a cache that it returned is part of the loss, where gradients cannot be "
            "told apart; pass use_cache=False"
        )

    def guarded(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        alias = x.view_as(x)
        alias.register_hook(refuse)
        return alias

    _rebuilt(cache, guarded, in_place=True)


def _rebuilt(x: Any, convert: Any, in_place: bool) -> Any:
    """Return ``x`` with ``convert`` applied to tensors in its attributes, lists and dicts."""
    if isinstance(x, Tensor):
        return convert(x)
    if isinstance(x, list | tuple):
        return type(x)(_rebuilt(y, convert, in_place) for y in x)
    if isinstance(x, dict):
        return {key: _rebuilt(y, convert, in_place) for key, y in x.items()}
    if not type(x).__module__.startswith("transformers.") or not hasattr(x, "__dict__"):
        return x
    found = x if in_place else object.__new__(type(x))
    for name, value in vars(x).items():
        vars(found)[name] = _rebuilt(value, convert, in_place)
    return found
