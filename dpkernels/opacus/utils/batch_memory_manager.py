"""``BatchMemoryManager``: large batches in microbatches that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from dpkernels.engine.sharding import fsdp_modules
from dpkernels.opacus.optimizers import DPOptimizer
from dpkernels.run.loader import PrivateLoader

_END = object()


class SplitLoader:
    """A private loader's batches in microbatches of at most ``max_batch_size`` records.

    The optimizer takes a step after the last of each batch, and skips the others: the loader says
    which microbatch was handed out, however far ahead its workers are. Attributes are the loader's.
    """

    def __init__(self, loader: PrivateLoader, max_batch_size: int) -> None:
        self.loader = loader
        self.max_batch_size = max_batch_size

    def __iter__(self) -> Iterator[Any]:
        microbatches = iter(self.loader)
        while (microbatch := self._next(microbatches)) is not _END:
            yield microbatch

    def _next(self, microbatches: Iterator[Any]) -> Any:
        """Return the next one; the loader has this size only while it picks records for it."""
        before = self.loader.max_physical_batch_size
        self.loader.max_physical_batch_size = self.max_batch_size
        try:
            return next(microbatches, _END)
        finally:
            self.loader.max_physical_batch_size = before

    def __len__(self) -> int:
        """Return how many microbatches an epoch has, as expected."""
        parts = self.loader.expected_batch_size / self.max_batch_size
        return math.ceil(len(self.loader) * max(1.0, parts))

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def wrap_data_loader(
    *, data_loader: DataLoader[Any], max_batch_size: int, optimizer: DPOptimizer
) -> SplitLoader:
    """Return the loader's batches in microbatches; arguments as ``BatchMemoryManager``'s.

    Raises ValueError for a model that is sharded over several processes.
    """
    if not isinstance(max_batch_size, int) or max_batch_size < 1:
        raise ValueError(f"max_physical_batch_size must be an integer >= 1, got {max_batch_size!r}")
    run = optimizer.run
    if run is None:
        raise ValueError(
            "BatchMemoryManager: optimizer must be the one that make_private returned, whose "
            "loader knows which microbatch is the last of its batch; with a DPOptimizer built by "
            "hand, split batches yourself and call optimizer.signal_skip_step(True) before each "
            "step() but the last"
        )
    if data_loader is not run.loader:
        raise ValueError(
            "data_loader must be the one that make_private returned with this optimizer, which is "
            f"accounted for, got another {type(data_loader).__name__}"
        )
    training = run.training
    if training.world_size > 1 and fsdp_modules(training.model):
        raise ValueError(
            "BatchMemoryManager: the model is sharded over processes, which must all have as many "
            "microbatches, but how many a sampled batch has differs between them, and one would "
            "wait for the other; lower batch_size, or use DistributedDataParallel"
        )
    return SplitLoader(run.loader, max_batch_size)


class BatchMemoryManager:
    """A context that gives the loader's batches in microbatches.

    ``optimizer.step()`` after each microbatch takes one step for each batch: gradients of
    microbatches are clipped and added up as they come, and get noise once.
    """

    def __init__(
        self,
        *,
        data_loader: DataLoader[Any],
        max_physical_batch_size: int,
        optimizer: DPOptimizer,
    ) -> None:
        self.data_loader = data_loader
        self.max_physical_batch_size = max_physical_batch_size
        self.optimizer = optimizer

    def __enter__(self) -> SplitLoader:
        return wrap_data_loader(
            data_loader=self.data_loader,
            max_batch_size=self.max_physical_batch_size,
            optimizer=self.optimizer,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing was changed that had to be put back."""
