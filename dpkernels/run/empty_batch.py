"""What a collate function would return for no records, from what it returns for one and for two."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.utils.rnn import PackedSequence


def empty_batch(one: Any, two: Any) -> Any:
    """Return the batch of no records: ``one`` with every axis and list of records cut to length 0.

    one, two: what the collate function makes of a record, and of that record twice. What is twice
        as long in ``two`` counts records, whichever axis it is; what is not, padding and public
        constants say, stays. Tensors, arrays, mappings, sequences, named tuples and dataclasses.

    Raises ValueError if nothing counts records, or for what cannot be empty.
    """
    batch, found = _emptied(one, two)
    if not found:
        raise ValueError(
            "collate_fn: of what it returns, nothing is twice as long for two records as for one, "
            "so that there is no telling what an empty batch is; return tensors with records as "
            "the first axis"
        )
    return batch


def _emptied(one: Any, two: Any) -> tuple[Any, bool]:
    """Return ``one`` without records, and whether there was something that counts them."""
    if isinstance(one, PackedSequence):
        raise ValueError(
            "collate_fn: a PackedSequence cannot be empty, as some batches under Poisson sampling "
            "are; return padded sequences and lengths, and pack them in the model"
        )
    if hasattr(one, "shape"):
        for axis, (short, long) in enumerate(zip(one.shape, two.shape, strict=True)):
            if long == 2 * short > 0:
                return one[(*[slice(None)] * axis, slice(0, 0))], True
        return one, False
    if isinstance(one, str | bytes | int | float | complex | None):
        return one, False
    if isinstance(one, Mapping):
        parts, found = _all_emptied([*one.values()], [two[key] for key in one])
        # A copy, as of a BatchEncoding, which cannot be made from a mapping alone.
        batch: Any = copy.copy(one)
        for key, part in zip(one, parts, strict=True):
            batch[key] = part
        return batch, found
    if isinstance(one, Sequence):
        kind: Any = type(one)
        if hasattr(one, "_fields"):
            parts, found = _all_emptied(one, two)
            return kind(*parts), found
        if len(two) == 2 * len(one) > 0:
            return kind(), True
        parts, found = _all_emptied(one, two)
        return kind(parts), found
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one) if field.init]
        values = [[getattr(batch, name) for name in names] for batch in (one, two)]
        parts, found = _all_emptied(*values)
        return dataclasses.replace(one, **dict(zip(names, parts, strict=True))), found
    raise ValueError(
        f"collate_fn: an empty batch of {type(one).__name__} cannot be made; return tensors, or "
        "mappings, sequences, named tuples or dataclasses of them"
    )


def _all_emptied(ones: Sequence[Any], twos: Sequence[Any]) -> tuple[list[Any], bool]:
    pairs = [_emptied(one, two) for one, two in zip(ones, twos, strict=True)]
    return [part for part, _ in pairs], any(found for _, found in pairs)
