"""Empty batches: of the structure, the shapes and the dtypes of others, without records."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import default_collate

from dpkernels.privacy.samplers import PoissonSampler
from dpkernels.run import PrivateLoader
from dpkernels.run.empty_batch import empty_batch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Example:
    x: Tensor
    width: int


class Opaque:
    """Something that nobody can look into."""


def of_no_records(record: Any, collate: Any) -> Any:
    """Return what a loader over that record gives for a batch without records."""
    # The chance that the record is drawn is 2^-40.
    loader = PrivateLoader([record], PoissonSampler(1, 2.0**-40, steps=1), collate_fn=collate)
    (batch,) = loader
    assert loader.batch_size_now == 0 and loader.is_last_microbatch
    return batch


RECORD = (torch.ones(3, 5, dtype=torch.float16), 4)


def test_default_collation() -> None:
    x, y = of_no_records(RECORD, None)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 3, 5), torch.float16, (0,), torch.int64)
    (only,) = of_no_records((torch.ones(2),), None)
    assert only.shape == (0, 2)
    named = of_no_records(Pair(torch.ones(2), torch.ones(1)), None)
    assert isinstance(named, Pair) and (named.x.shape, named.y.shape) == ((0, 2), (0, 1))


def test_mappings_with_strings_and_nesting() -> None:
    record = {"x": torch.ones(2), "name": "somebody", "more": {"y": [1.0, 2.0]}}
    batch = of_no_records(record, None)
    assert batch["x"].shape == (0, 2) and list(batch["name"]) == []
    assert [y.shape for y in batch["more"]["y"]] == [(0,), (0,)]
    assert type(of_no_records(UserDict(x=torch.ones(2)), None)) is UserDict


def test_padded_sequences_records_first_or_second() -> None:
    def padded(
        records: list[Tensor], batch_first: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], int]:
        lengths = torch.tensor([len(record) for record in records])
        return pad_sequence(records, batch_first=batch_first), lengths, records, 7

    for length in (1, 2, 4):
        record = torch.ones(length, 6)
        x, lengths, each, constant = of_no_records(record, lambda r: padded(r, True))
        assert (x.shape, lengths.shape, each, constant) == ((0, length, 6), (0,), [], 7)
        x, lengths, _, _ = of_no_records(record, lambda r: padded(r, False))
        assert (x.shape, lengths.shape) == ((length, 0, 6), (0,))


def test_concatenated_sequences_and_offsets() -> None:
    def joined(records: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat(records), torch.tensor([len(r) for r in records]).cumsum(0)

    tokens, offsets = of_no_records(torch.arange(4), joined)
    assert (tokens.shape, offsets.shape) == ((0,), (0,))


def test_dataclasses_and_arrays() -> None:
    batch = of_no_records(RECORD, lambda records: Example(default_collate(records)[0], 5))
    assert isinstance(batch, Example) and batch.x.shape == (0, 3, 5) and batch.width == 5
    array = of_no_records(RECORD, lambda records: np.stack([x.numpy() for x, _ in records]))
    assert array.shape == (0, 3, 5) and array.dtype == np.float16


def test_data_sets_that_fetch_many_at_once() -> None:
    class Table:
        """Records as rows, fetched by a list of indices."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            raise AssertionError("records are fetched together")

        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [torch.full((2,), i) for i in indices]

    (batch,) = PrivateLoader(Table(), PoissonSampler(4, 2.0**-40, steps=1))  # type: ignore[arg-type]
    assert batch.shape == (0, 2)


def test_a_collate_function_that_alters_records() -> None:
    class Fresh(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return {"x": torch.ones(2), "junk": 0}

    def popping(records: list[dict[str, Any]]) -> Any:
        for record in records:
            record.pop("junk")
        return default_collate(records)

    (batch,) = PrivateLoader(Fresh([0]), PoissonSampler(1, 2.0**-40, steps=1), collate_fn=popping)
    assert batch["x"].shape == (0, 2)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda records: torch.stack([x for x, _ in records]).mean(0), "nothing is twice as long"),
        (lambda records: pack_sequence([x for x, _ in records]), "PackedSequence cannot be empty"),
        (lambda records: Opaque(), "an empty batch of Opaque cannot be made"),
    ],
)
def test_what_cannot_be_empty_is_refused(collate: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_no_records(RECORD, collate)


def test_the_batch_of_one_record_is_left_as_it_was() -> None:
    one, two = {"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}
    assert empty_batch(one, two)["x"].shape == (0, 2)
    assert one["x"].shape == (1, 2)
