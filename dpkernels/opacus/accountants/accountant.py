"""``IAccountant``: the interface that Opacus' users know, and may implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

Step = tuple[float, float, int]  # noise multiplier, sample rate, how often


class IAccountant(ABC):
    """Adds up steps of a Gaussian mechanism, each with a noise multiplier and a Poisson rate.

    history: (noise multiplier, sample rate, steps), in the order of the run.
    """

    history: Sequence[Step]

    @abstractmethod
    def __init__(self) -> None:
        self.history = []

    @abstractmethod
    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Add one step whose samples were drawn by Poisson sampling."""

    @abstractmethod
    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Return the epsilon spent so far, at ``delta``."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many entries the history has; 0 before the first step."""

    @classmethod
    @abstractmethod
    def mechanism(cls) -> str:
        """Return the name that ``create_accountant`` knows it by."""

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Optimizer], None]:
        """Return a hook for ``DPOptimizer.attach_step_hook`` that adds each step at this rate.

        ``make_private`` accounts for its steps itself: attached there, it counts them twice.
        """

        def hook(optimizer: Optimizer) -> None:
            noise_multiplier = optimizer.noise_multiplier  # type: ignore[attr-defined]
            self.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)

        return hook

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return history and mechanism, written into ``destination`` if there is one."""
        destination = {} if destination is None else destination
        destination["history"] = deepcopy(list(self.history))
        destination["mechanism"] = self.mechanism()
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the history of ``state_dict``; raise ValueError if it is another's."""
        self.check_state(state_dict)
        self.history = state_dict["history"]

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``state_dict`` is of an accountant of this kind."""
        for key in ("history", "mechanism"):
            if not state_dict or key not in state_dict:
                raise ValueError(
                    f"load_state_dict: state_dict must have {key!r}; pass what state_dict() "
                    "returned"
                )
        if state_dict["mechanism"] != self.mechanism():
            raise ValueError(
                f"load_state_dict: state_dict is of the {state_dict['mechanism']!r} accountant, "
                f"this is {self.mechanism()!r}; build PrivacyEngine(accountant="
                f"{state_dict['mechanism']!r})"
            )
