"""What preconditioners from probes have in common: when they are estimated, and from what."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic

import torch
from torch import nn

from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.scaled import check_sides
from dpkernels.engine.sides import IDENTITY, Sides
from dpkernels.precondition.estimate import Loss, Moments, collect, started
from dpkernels.precondition.probes import Probe

_STATE = {"steps", "refreshes", "generator", "estimation", "not_private", "moments"}


class Refreshed(ABC, Generic[Moments]):
    """A preconditioner that is estimated when it is first asked for, and again as time goes by.

    Arguments as for ``Kfac``. Raises ValueError for counts below 1, and for a probe that does not
    say whether it is private. What one kind estimates, and what it makes of it, is up to the
    methods at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        loss: Loss,
        *,
        batches: int,
        batch_size: int,
        refresh_every: int | None,
        seed: int,
    ) -> None:
        self._check_counts(batches=batches, batch_size=batch_size, refresh_every=refresh_every)
        self._check_says(probe)
        self.refresh_every = refresh_every
        self.refreshes = 0
        self._model, self._probe, self._loss = model, probe, loss
        self._batches, self._batch_size = batches, batch_size
        # Beside the CPU, so that probes do not depend on the device; they go on from one refresh to
        # the next.
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = 0
        self._void: str | None = None  # of all probes that sides have come from
        self._moments: dict[str, Moments] = {}
        self._sides: dict[str, Sides] = {}
        self._seconds = self._sides_seconds = 0.0

    @property
    def not_private(self) -> str | None:
        """Why there is no guarantee; None unless probes hold private data, now or ever before.

        It stays, and goes through checkpoints: whatever was trained with such sides depends on
        them. A probe that has ceased to say counts as private.
        """
        silent = "the probe does not say whether it draws from private data"
        return self._void or getattr(self._probe, "not_private", silent)

    @property
    def layers(self) -> frozenset[str]:
        """The names of the layers that have sides."""
        self._ensure()
        return frozenset(self._sides)

    def sides(self, layer: str) -> Sides:
        """Return what the layer of that name is preconditioned by; identity for the others."""
        self._ensure()
        return self._sides.get(layer, IDENTITY)

    def moments(self) -> Mapping[str, Moments]:
        """Return what was estimated, as of the last refresh, by the layer's name."""
        self._ensure()
        return self._moments

    def after_step(self) -> None:
        """Count a step of the optimizer, and refresh if it is time."""
        self._steps += 1
        if self.refresh_every is not None and self._steps % self.refresh_every == 0:
            self.refresh()

    def refresh(self) -> None:
        """Estimate everything at the present parameters, from new probes.

        A logical step that has begun keeps the sides that it began with.
        """
        start = time.perf_counter()
        batches = (
            self._probe.batch(self._batch_size, self._generator) for _ in range(self._batches)
        )
        moments = collect(self._model, batches, self._loss, self._start, self._why_not)
        estimated = time.perf_counter()
        void = self.not_private
        self._moments, self._sides, self._void = moments, self._marked(moments, void), void
        self.refreshes += 1
        end = time.perf_counter()
        self._seconds, self._sides_seconds = end - start, end - estimated

    def fingerprint(self) -> str:
        """Return what is the same where the same was estimated, from the same probes."""
        self._ensure()
        place = hashlib.sha256(self._generator.get_state().numpy().tobytes()).hexdigest()[:16]
        return f"{self._estimation()} from {self._probes()}, generator at {place}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: what was estimated, and where probes and schedule are."""
        self._ensure()
        return {
            "steps": self._steps,
            "refreshes": self.refreshes,
            "generator": self._generator.get_state(),
            "estimation": self._estimation(),
            "not_private": self.not_private,
            "moments": {name: x.state_dict() for name, x in self._moments.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint with the sides that it was made with.

        Sides of private probes make this not private, whatever its own probe is. Raises ValueError
        for a state of other layers, of other sizes, or of another kind of sides.
        """
        op = f"{type(self).__name__}.load_state_dict"
        if missing := _STATE - state.keys():
            raise ValueError(
                f"{op}: state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
            )
        wanted = self._estimation()
        if state["estimation"] != wanted:
            raise ValueError(
                f"{op}: state must be of {wanted}, got {state['estimation']}; make the "
                "preconditioner as it was saved"
            )
        moments = started(self._model, self._start)
        if moments.keys() != state["moments"].keys():
            raise ValueError(
                f"{op}: state must be of the layers {list(moments)}, got "
                f"{list(state['moments'])}; load it for the model that it was saved with"
            )
        for name, x in moments.items():
            x.load_state_dict(state["moments"][name])
        void = self._void or state["not_private"]
        sides = self._marked(moments, void)
        for name, one in sides.items():
            check_sides(moments[name].layer, one)
        self._moments, self._sides, self._void = moments, sides, void
        self._steps, self.refreshes = state["steps"], state["refreshes"]
        self._generator.set_state(state["generator"])

    def _marked(self, moments: Mapping[str, Moments], void: str | None) -> dict[str, Sides]:
        """Return the sides of the layers that have some, which say themselves what they are."""
        sides = self._sides_of(moments)
        return {name: dataclasses.replace(x, not_private=void) for name, x in sides.items()}

    def _ensure(self) -> None:
        if self.refreshes == 0:
            self.refresh()

    def _probes(self) -> str:
        """Return what a refresh looks at, for a report."""
        return f"{self._batches} x {self._batch_size} of {self._probe.describe()}"

    @classmethod
    def _check_counts(cls, **counts: int | None) -> None:
        """Raise ValueError for one that is there and below 1."""
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{cls.__name__}: {name} must be at least 1, got {count}")

    @classmethod
    def _check_says(cls, probe: Probe) -> None:
        """Raise ValueError unless the probe says whether it draws from private data."""
        said = getattr(probe, "not_private", False)
        if said is not None and not (isinstance(said, str) and said):
            raise ValueError(
                f"{cls.__name__}: probe must say in not_private why there is no guarantee, or None "
                f"if it draws from no private data, got {said!r} from {type(probe).__name__}"
            )

    def _estimation(self) -> dict[str, Any]:
        """Return what sides must have in common to be gone on with."""
        return {"kind": type(self).__name__}

    @abstractmethod
    def _start(self, layer: Layer) -> Moments:
        """Return what a refresh collects of a layer, before the first batch."""

    @abstractmethod
    def _why_not(self, layer: Layer) -> str | None:
        """Return why nothing is collected of a layer; None if something is."""

    @abstractmethod
    def _sides_of(self, moments: Mapping[str, Moments]) -> dict[str, Sides]:
        """Return the sides of the layers that have some."""
