"""Who holds which model: so that another ``make_private`` ends the one before.

Training loops come back to a model: a phase with other layers frozen, a round of federated code.
What ended the private training of the round before may be out of the caller's sight by then, so the
model itself remembers it. A copy of the model remembers nothing: it is in nobody's training.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from dpkernels.ops.noise import NoiseKey

_ATTRIBUTE = "_held_by"


class Holder:
    """What ends the private training of one model, and the seeds that its noise came from.

    waits: whether a batch of that training was handed out and has no step yet.
    """

    def __init__(self) -> None:
        self.end: Callable[[], None] | None = None
        self.waits: Callable[[], bool] = lambda: False
        self.seeds: Counter[int] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        return Holder, ()


def hold(model: nn.Module, end: Callable[[], None], waits: Callable[[], bool]) -> None:
    """Note what ends the private training that ``model`` is in now, and whether a batch waits."""
    holder = _holder_of(model)
    holder.end, holder.waits = end, waits


def check_no_batch_waits(model: nn.Module) -> None:
    """Raise RuntimeError if the training that ``model`` is in has a batch without a step.

    Whoever may leave out batches after a look at them chooses what is released.
    """
    if is_held(model) and _holder_of(model).waits():
        raise RuntimeError(
            "make_private: a batch of the private training before was handed out and has no step; "
            "iterate its loader again, which begins with that batch, and call step()"
        )


def release(model: nn.Module) -> None:
    """End the private training that ``model`` is in, if this package has begun it."""
    holder = _holder_of(model)
    end, holder.end = holder.end, None
    if end is not None:
        end()


def let_go(model: nn.Module) -> None:
    """Note that the private training of ``model`` has ended."""
    _holder_of(model).end = None


def is_held(model: nn.Module) -> bool:
    """Return whether ``model`` is in private training that ``release`` can end."""
    holder = vars(model).get(_ATTRIBUTE)
    return isinstance(holder, Holder) and holder.end is not None


def noise_key_for(model: nn.Module, seed: int | None) -> NoiseKey | None:
    """Return a seeded key that this model's noise was never drawn from; None without a seed.

    The same seed in two rounds would give both the same noise, which their difference is free of.
    """
    if seed is None:
        return None
    seeds = _holder_of(model).seeds
    times, seeds[seed] = seeds[seed], seeds[seed] + 1
    if times:
        digest = hashlib.sha256(f"{seed}/{times}".encode()).digest()
        seed = int.from_bytes(digest[:7])
    return NoiseKey.from_seed(seed)


def _holder_of(model: nn.Module) -> Holder:
    # Not through nn.Module.__setattr__, and so no part of any state_dict.
    holder: Holder = vars(model).setdefault(_ATTRIBUTE, Holder())
    return holder
