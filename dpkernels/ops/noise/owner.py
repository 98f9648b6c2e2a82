"""What ``NoiseKey`` and ``RowKeys`` share: where keys come from, and that nothing copies them."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from dpkernels.ops.noise.reference import philox

# Keys are derived from counters that no noise uses: reserve() stays below 2^63.
_DERIVED = 2**63


class KeyOwner:
    """A secret of one process: never copied, never pickled, of no use in a forked process.

    ``_for_workers`` says how another process gets keys of its own, for messages.
    """

    _for_workers: ClassVar[str]

    _seed: int | None
    _process: int
    _lock: threading.Lock

    def _own(self, seed: int | None) -> None:
        self._seed = seed
        self._process = os.getpid()
        self._lock = threading.Lock()

    @property
    def seed(self) -> int | None:
        """The fixed seed, or None if keys came from the operating system. For reports."""
        return self._seed

    @property
    def _source(self) -> str:
        return "operating system" if self._seed is None else f"seed {self._seed}"

    @classmethod
    def _check_count(cls, method: str, count: int) -> None:
        if count < 0:
            raise ValueError(f"{cls.__name__}.{method}: count must be >= 0, got {count}")

    def _check_process(self, method: str) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: this key belongs to the parent process, which "
                f"would draw the same noise; {self._for_workers}"
            )

    @classmethod
    def _check_state(cls, state: dict[str, Any], entries: set[str]) -> None:
        missing = entries - state.keys()
        if missing:
            raise ValueError(
                f"{cls.__name__}.load_state_dict: state lacks {', '.join(sorted(missing))}; pass "
                "what state_dict() returned"
            )

    @classmethod
    def _warn_of_seed(cls, seed: int, private: str) -> None:
        warnings.warn(
            f"{cls.__name__} with the fixed seed {seed}: whoever knows it can subtract the noise; "
            f"use {private} for private data",
            stacklevel=3,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: two copies would draw the same "
            f"noise; {self._for_workers} and state_dict() for checkpoints"
        )


def from_os_entropy(n: int) -> tuple[Tensor, Tensor]:
    """Return n random keys and first counters; half of the counters stay ahead of each."""
    words = torch.from_numpy(np.frombuffer(os.urandom(16 * n), np.int64).copy())
    return words[:n], words[n:] >> 2 & (2**62 - 1)


def derived_keys(key: int, indices: Tensor, domain: int) -> Tensor:
    """Return the keys that belong to (key, index), int64 ``[n]``, for int64 ``[n]`` indices >= 0.

    domain: a number below 2^32 for each use, so that no two uses derive the same key.
    """
    counters = torch.empty(len(indices), 4, dtype=torch.int64)
    counters[:, 0], counters[:, 1] = indices & 0xFFFFFFFF, indices >> 32
    counters[:, 2], counters[:, 3] = domain, _DERIVED >> 32
    low, high = philox(counters, key)[:, :2].unbind(-1)
    return low | high << 32
