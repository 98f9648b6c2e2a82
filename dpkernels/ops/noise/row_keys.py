"""Many keys of the noise stream at once: one for each client, with a counter of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpkernels.ops.noise.owner import KeyOwner, derived_keys, from_os_entropy

_LAST = 2**63 - 1  # the largest next counter that int64 holds
_ROWS = 1  # the domain of their keys: children of a NoiseKey have another


class RowKeys(KeyOwner):
    """n keys of 64 bits, and the next unused counter of each one's stream.

    ``RowKeys(n)`` draws keys and first counters (62 bits of each) from the operating system's
    entropy, in one call. ``RowKeys.from_seed(seed, n)`` is for tests: whoever knows the seed can
    subtract the noise. Client i's key then depends on (seed, i) alone, not on n.

    Like a ``NoiseKey``, it is never duplicated: copying or pickling it raises, and so does using
    it in a forked process. ``state_dict()`` goes into a checkpoint. 16 n bytes.
    """

    _for_workers = "use a new RowKeys(n) for other workers"

    def __init__(self, n: int) -> None:
        self._check_n(n)
        self._draw(n)

    @classmethod
    def from_seed(cls, seed: int, n: int) -> RowKeys:
        """Return the reproducible keys of ``seed``, with a warning: they protect nobody."""
        cls._check_n(n)
        cls._warn_of_seed(seed, "RowKeys(n)")
        self = cls.__new__(cls)
        self._set_seeded(seed, torch.zeros(n, dtype=torch.int64))
        return self

    @classmethod
    def _check_n(cls, n: int) -> None:
        if n < 0:
            raise ValueError(f"RowKeys: n must be >= 0, got {n}")

    def _draw(self, n: int) -> None:
        self._own(seed=None)
        self._keys, self._counters = from_os_entropy(n)

    def _set_seeded(self, seed: int, counters: Tensor) -> None:
        self._own(seed)
        self._keys = derived_keys(seed, torch.arange(len(counters)), _ROWS)
        self._counters = counters

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Tensor:
        """The keys, int64 ``[n]``. To use one, ``reserve`` a counter with it; do not write."""
        return self._keys

    @property
    def counters(self) -> Tensor:
        """The next unused counters, int64 ``[n]``: a copy. To use one, ``reserve`` it."""
        with self._lock:
            return self._counters.clone()

    def reserve(self, rows: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
        """Take ``count`` counters out of the stream of each of these rows.

        rows: int64 ``[k]`` on the CPU, each in [0, n), none twice.
        Returns the rows' keys and the first of their counters, both int64 ``[k]``, as
        ``add_row_noise_`` takes them; the others follow by adding 1 to count - 1.

        The counters are gone whether noise was drawn with them or not, so an exception between
        reserving and using never leads to a second use. Thread-safe. Raises ValueError for bad
        rows, and RuntimeError if a row has no counters left; then no row's counter has moved.
        """
        self._check_count("reserve", count)
        self._check_process("reserve")
        self._check_rows(rows)
        with self._lock:
            first = self._counters[rows]
            if count > _LAST or bool((first > _LAST - count).any()):
                raise RuntimeError(
                    "RowKeys.reserve: all counters of a row are used; make a new RowKeys(n)"
                )
            self._counters[rows] = first + count
            return self._keys[rows], first

    def _check_rows(self, rows: Tensor) -> None:
        if rows.dtype != torch.int64 or rows.dim() != 1 or rows.device.type != "cpu":
            raise ValueError(
                "RowKeys.reserve: rows must be int64 [k] on the CPU, got "
                f"{list(rows.shape)} {rows.dtype} on {rows.device}"
            )
        ordered = np.sort(rows.numpy())
        if len(ordered) and (ordered[0] < 0 or ordered[-1] >= len(self)):
            raise ValueError(
                f"RowKeys.reserve: rows must be in [0, {len(self)}), got {ordered[0]} to "
                f"{ordered[-1]}"
            )
        if bool((ordered[1:] == ordered[:-1]).any()):
            raise ValueError(
                "RowKeys.reserve: rows names a row twice, which would give it the same noise "
                "twice; pass each row once, and take more counters with count"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the seed and the counters, of which the keys follow.

        Of entropy keys there is nothing to keep: whoever reads the checkpoint could compute all
        noise so far and subtract it, and a restart draws fresh keys anyway.
        """
        if self._seed is None:
            return {"seed": None, "counters": None}
        return {"seed": self._seed, "counters": self.counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint; without ever repeating noise, but for seeded keys.

        Entropy keys are replaced by as many fresh ones: (key, counter) pairs after the restart
        cannot meet those before it. Seeded keys are restored exactly, so that tests can resume bit
        for bit: what was drawn after the checkpoint is drawn again. Raises ValueError for a state
        of another number of rows.
        """
        self._check_state(state, {"seed", "counters"})
        if state["seed"] is None:
            self._draw(len(self))
            return
        counters = state["counters"]
        fits = isinstance(counters, Tensor) and counters.dtype == torch.int64
        if not fits or counters.shape != self._keys.shape or bool((counters < 0).any()):
            raise ValueError(
                f"RowKeys.load_state_dict: counters must be int64 [{len(self)}] in [0, 2^63), as "
                "state_dict() of as many rows returned them"
            )
        self._warn_of_seed(state["seed"], "RowKeys(n)")
        self._set_seeded(state["seed"], counters.to("cpu", copy=True))

    def __repr__(self) -> str:
        return f"RowKeys({len(self)} rows, {self._source})"
