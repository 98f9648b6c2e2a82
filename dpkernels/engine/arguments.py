"""What a model is given and what it returns: where samples are, and how to take some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpkernels.engine.layers.caches import is_cache
from dpkernels.engine.layers.layer import Unsupported

_PLAIN = (bool, int, float, str, type(None))
# So many forms tell integers apart by their values. A model that is given another one in every call
# (a time step) is tried out that often, and not in every step.
_BY_VALUE = 32


def samples_of(inputs: Sequence[Any]) -> int | None:
    """Return the first axis of the first tensor that has one, or how many sequences are packed."""
    for given in inputs:
        # Most models get tensors, for which a walk through a tree takes 25 us too many.
        for leaf in (given,) if isinstance(given, Tensor) else tree_leaves(given, _is_packed):
            if isinstance(leaf, PackedSequence):
                return int(leaf.batch_sizes[0])
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.shape[0]
    return None


def check_can_be_opened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise Unsupported for arguments that hide tensors: nothing shows whether these mix."""
    for given in (*args, *kwargs.values()):
        if isinstance(given, (Tensor, *_PLAIN)):
            continue
        for leaf in tree_leaves(given, _is_packed):
            if not isinstance(leaf, (Tensor, PackedSequence, *_PLAIN)) and _hides_tensors(leaf):
                raise Unsupported(
                    f"the model is given a {type(leaf).__name__}, inside of which samples cannot "
                    "be told apart; pass tensors, tuples, lists or dicts (model(**batch) for a "
                    "BatchEncoding)"
                )


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, type | nn.Module) or is_cache(leaf):
        return False
    inside = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
    return any(isinstance(x, Tensor) for x in tree_leaves(list(dict(inside).values())))


def form_of(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    alone: bool,
    modules: Sequence[nn.Module],
    known: int,
) -> tuple[Any, ...]:
    """Return what tells forms of a call apart: kinds, dimensions and options, but not lengths.

    alone: whether there is one sample. modules: of the model, whose modes count. known: how many
    forms there are already.
    """
    given = (*args, *kwargs.values())
    structure: Any
    if all(isinstance(x, (Tensor, *_PLAIN)) for x in given):
        leaves, structure = list(given), (len(args), *kwargs)
    else:
        leaves, structure = tree_flatten((args, kwargs))
    by_value = (bool, str, int) if known < _BY_VALUE else (bool, str)
    kinds = [
        (x.dim(), x.dtype) if isinstance(x, Tensor) else (x if isinstance(x, by_value) else type(x))
        for x in leaves
    ]
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    modes = bytes(module.training for module in modules)
    return (alone, modes, structure, *kinds, *autocast)


@dataclass(frozen=True)
class Arguments:
    """What the model is called with: leaves of a tree, and how many samples they hold."""

    leaves: list[Any]
    structure: Any
    batch: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Arguments:
        """Take arguments apart."""
        leaves, structure = tree_flatten((args, kwargs), is_leaf=_is_packed)
        return cls(leaves, structure, batch)

    def chosen(
        self, rows: Tensor, follow: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Return arguments with samples ``rows``, and the floating tensors among them.

        rows: int64 ``[B]``. All tensors are copies, which a forward pass may change.
        follow: whether the floating ones are to get gradients.
        """
        copies: list[Any] = []
        inputs = []
        for leaf in self.leaves:
            if _is_packed(leaf):
                leaf = _of_samples(leaf, rows)
            elif isinstance(leaf, Tensor) and not self._has_samples(leaf):
                leaf = leaf.detach().clone()
            elif isinstance(leaf, Tensor):
                leaf = _of_samples(leaf, rows)
                if follow and leaf.is_floating_point() and torch.is_grad_enabled():
                    inputs.append(leaf.requires_grad_())
                    leaf = leaf.clone()  # a leaf must not be changed in place
            copies.append(leaf)
        args, kwargs = tree_unflatten(copies, self.structure)
        return args, kwargs, inputs

    @property
    def differ(self) -> bool:
        """Whether one sample can be told from another; a batch of zeros shows nothing."""
        return self.batch < 2 or any(
            _is_packed(x) or (self._has_samples(x) and not torch.equal(x, x[:1].expand_as(x)))
            for x in self.leaves
        )

    @property
    def can_move(self) -> bool:
        """Whether samples can change places: none of them is on another axis (states of an RNN)."""
        return not any(
            isinstance(x, Tensor)
            and not self._has_samples(x)
            and any(size and size % self.batch == 0 for size in x.shape)
            for x in self.leaves
        )

    def _has_samples(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.shape[:1] == (self.batch,)


def outputs_of(model: nn.Module, output: Any) -> list[Tensor]:
    """Return the floating tensors that the model returns; sequences as ``[B, T, ...]``.

    Raises Unsupported for an object inside of which tensors cannot be found.
    """
    leaves = _opened(output)
    for x in leaves:
        if not isinstance(x, (Tensor, *_PLAIN)) and not is_cache(x) and _hides_tensors(x):
            raise Unsupported(
                f"{type(model).__name__} returns a {type(x).__name__}, inside of which tensors "
                "cannot be followed; return tensors, tuples, lists, dicts or dataclasses"
            )
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _opened(output: Any) -> list[Any]:
    found: list[Any] = []
    for leaf in tree_leaves(output, is_leaf=_is_packed):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            found += _opened([getattr(leaf, field.name) for field in fields(leaf)])
        elif isinstance(leaf, PackedSequence):
            found.append(pad_packed_sequence(leaf, batch_first=True)[0])
        else:
            found.append(leaf)
    return found


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _of_samples(leaf: Any, rows: Tensor) -> Any:
    """Return some samples of a batch: a tensor ``[B, ...]``, or packed sequences."""
    if isinstance(leaf, Tensor):
        return leaf.detach()[rows.to(leaf.device)]
    padded, lengths = pad_packed_sequence(leaf, batch_first=True)
    own = padded.detach()[rows.to(padded.device)], lengths[rows]
    return pack_padded_sequence(*own, batch_first=True, enforce_sorted=False)
