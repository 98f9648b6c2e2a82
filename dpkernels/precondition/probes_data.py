"""Probes that are data: public, or, as an oracle, private."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset, default_collate

from dpkernels.precondition.probes_synthetic import (
    Labels,
    check_labels,
    describe_labels,
    draw_labels,
)


class _Records:
    """Records of a data set, drawn uniformly with replacement."""

    def __init__(self, op: str, dataset: Any, classes: Labels | None) -> None:
        if not len(dataset):
            raise ValueError(f"{op}: dataset must have records, got none")
        if classes is not None:
            check_labels(op, classes)
        fields = len(dataset[0]) if isinstance(dataset[0], tuple | list) else 1
        if classes is None and fields < 2:
            raise ValueError(
                f"{op}: records of dataset must be (*inputs, target), got one field; pass classes= "
                "for data without targets"
            )
        self._dataset, self.classes = dataset, classes

    def batch(self, size: int, generator: Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return inputs ``[size, ...]`` and targets ``[size]``.

        Without ``classes`` the last field of a record is its target. With it, targets are drawn,
        and of a record that has several fields all but the last are inputs.
        """
        indices = torch.randint(
            len(self._dataset), (size,), generator=generator, device=generator.device
        )
        fields = _fields(self._dataset, indices.cpu())
        inputs = fields[:-1] if len(fields) > 1 else fields
        if self.classes is not None:
            return inputs, draw_labels(self.classes, size, generator)
        return inputs, fields[-1]

    def _description(self) -> str:
        targets = "their own targets" if self.classes is None else describe_labels(self.classes)
        return f"{len(self._dataset)} records, {targets}"


def _fields(dataset: Any, indices: Tensor) -> tuple[Tensor, ...]:
    if isinstance(dataset, Tensor):
        return (dataset[indices],)
    if isinstance(dataset, TensorDataset):
        return tuple(tensor[indices] for tensor in dataset.tensors)
    batch = default_collate([dataset[index] for index in indices.tolist()])
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


class PublicData(_Records):
    """Records that are public: building this declares that no private record is among them.

    dataset: with ``len`` and records ``(*inputs, target)``, as models and losses take them; or,
        with ``classes``, a tensor ``[N, ...]`` of inputs.
    classes: draw targets like this instead of using the data's own, which may be of other classes.
    """

    def __init__(self, dataset: Any, *, classes: Labels | None = None) -> None:
        super().__init__("PublicData", dataset, classes)

    @property
    def not_private(self) -> None:
        """Nothing is in the way of a guarantee, if the declaration is true."""
        return None

    def describe(self) -> str:
        """Return how many, and whose word it is that they are public."""
        return f"data declared public, {self._description()}"


class PrivateData(_Records):
    """Private records: the oracle that others are compared with. It has no guarantee.

    dataset, classes: as for ``PublicData``.
    not_private: must be True, which says that it is known: the preconditioner shows the records,
        and noise on the gradients does not hide that. Raises ValueError otherwise.
    """

    def __init__(self, dataset: Any, *, not_private: bool, classes: Labels | None = None) -> None:
        if not_private is not True:
            raise ValueError(
                "PrivateData: not_private must be True, which says that training with this "
                f"preconditioner has no epsilon, got {not_private!r}; use synthetic probes or "
                "PublicData for private training"
            )
        super().__init__("PrivateData", dataset, classes)

    @property
    def not_private(self) -> str:
        """Why there is no guarantee."""
        return "the preconditioner is estimated from private records (oracle), without noise"

    def describe(self) -> str:
        """Return how many, and that they are private."""
        return f"PRIVATE data (oracle, not private), {self._description()}"
