"""Keys of the noise stream: where they come from, and that no counter is used twice."""

from __future__ import annotations

from typing import Any

import torch

from dpkernels.ops.noise.owner import KeyOwner, derived_keys, from_os_entropy

_COUNTERS = 2**63
_CHILDREN = 0  # the domain of their keys: RowKeys has another


class NoiseKey(KeyOwner):
    """A 64-bit key and the next unused counter of its stream.

    ``NoiseKey()`` draws the key and the first counter (62 bits of it) from the operating system's
    entropy. ``NoiseKey.from_seed(n)`` is for tests: whoever knows the seed can subtract the noise.

    A key is never duplicated: copying or pickling one raises, and so does using one in a forked
    process. ``spawn(n)`` gives independent keys to other ranks or workers, and ``state_dict()``
    goes into a checkpoint.
    """

    _for_workers = "use spawn() for other workers"

    def __init__(self) -> None:
        self._draw()

    @classmethod
    def from_seed(cls, seed: int) -> NoiseKey:
        """Return the reproducible key of ``seed``, with a warning: it protects nobody."""
        cls._warn_of_seed(seed, "NoiseKey()")
        self = cls.__new__(cls)
        self._set(_derive(seed, 0), 0, seed=seed)
        return self

    def _draw(self) -> None:
        key, start = (int(x) for x in from_os_entropy(1))
        self._set(key, start, seed=None)

    def _set(self, key: int, counter: int, seed: int | None) -> None:
        self._own(seed)
        self._key = key
        self._counter = counter
        self._spawned = 0

    @property
    def key(self) -> int:
        """The key as a signed 64-bit integer, as ``add_gaussian_noise_`` takes it."""
        return self._key

    @property
    def counter(self) -> int:
        """The next unused counter. To use it, ``reserve`` it."""
        return self._counter

    def reserve(self, count: int = 1) -> int:
        """Take ``count`` counters out of the stream; return the first of them.

        They are gone whether noise was drawn with them or not, so an exception between reserving
        and using never leads to a second use. Thread-safe.
        """
        self._check_count("reserve", count)
        self._check_process("reserve")
        with self._lock:
            first = self._counter
            if first + count > _COUNTERS:
                raise RuntimeError("NoiseKey.reserve: all counters are used; make a new NoiseKey()")
            self._counter = first + count
        return first

    def spawn(self, count: int) -> list[NoiseKey]:
        """Return ``count`` independent keys, for ranks or workers.

        Children of an entropy key draw from the operating system again; children of a seeded key
        are derived from it and differ from one call to the next.
        """
        self._check_count("spawn", count)
        self._check_process("spawn")
        if self._seed is None:
            return [NoiseKey() for _ in range(count)]
        with self._lock:
            first = self._spawned
            self._spawned += count
        children = []
        for index in range(first, first + count):
            child = NoiseKey.__new__(NoiseKey)
            child._set(_derive(self._key, 1 + index), 0, seed=self._seed)
            children.append(child)
        return children

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: seed, key, counter and number of children.

        Of an entropy key there is nothing to keep: whoever reads the checkpoint could compute all
        noise so far and subtract it, and a restart draws a fresh key anyway.
        """
        if self._seed is None:
            return {"seed": None, "key": None, "counter": None, "spawned": None}
        return {
            "seed": self._seed,
            "key": self._key,
            "counter": self._counter,
            "spawned": self._spawned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint; without ever repeating noise, but for a seeded key.

        What was drawn between the checkpoint and now is not known here, so an entropy key is
        replaced by a fresh one: (key, counter) pairs after the restart cannot meet those before
        it. A seeded key is restored exactly, so that tests can resume bit for bit: what was drawn
        after the checkpoint is drawn again.
        """
        self._check_state(state, {"key", "counter", "spawned", "seed"})
        if state["seed"] is None:
            self._draw()
            return
        counter = state["counter"]
        if not isinstance(counter, int) or not 0 <= counter <= _COUNTERS:
            raise ValueError(
                f"NoiseKey.load_state_dict: counter must be an int in [0, 2^63], got {counter!r}"
            )
        self._warn_of_seed(state["seed"], "NoiseKey()")
        self._set(state["key"], counter, seed=state["seed"])
        self._spawned = state["spawned"]

    def __repr__(self) -> str:
        return f"NoiseKey({self._source}, counter {self._counter})"


def _derive(key: int, index: int) -> int:
    """Return the key of child ``index`` of ``key``, as a signed 64-bit integer."""
    return int(derived_keys(key, torch.tensor([index]), _CHILDREN))
