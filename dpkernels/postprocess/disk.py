"""DiSK: a Kalman filter, reduced to two numbers, between private gradients and any optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpkernels.postprocess.adam_bc import DPAdamBC
from dpkernels.postprocess.noise_level import NoiseOf, NoisyTraining


class DiSK(Optimizer):
    """Any optimizer, on filtered gradients (Zhang et al. 2025, in the form with one gradient).

    g_t = (1 - kappa) g_(t-1) + kappa g~(x_t + gamma (x_t - x_(t-1))),  gamma = (1 - kappa) / kappa
    x_(t+1) = what ``optimizer`` makes of x_t with the gradient g_t

    g~ is the private gradient, and g_1 the first of them. The paper mixes g~ from gradients at x_t
    and at the shifted point; at this gamma the former has the weight 0, and one is enough. The
    shift makes up for the filter's delay: on a quadratic function without noise g_t is the gradient
    at x_t, while the variance of the noise goes down to kappa / (2 - kappa) of what it was.

    optimizer: over the parameters; its groups are shared, so that schedules reach it.
    kappa: in (0, 1]: how much a new gradient counts; 1 is ``optimizer`` itself. 0.7 is the
        default of its authors' code.

    Between steps the parameters are at the shifted point, where the loop is to compute its next
    gradient. Evaluate and save models at x_t::

        with optimizer.at_iterate():
            accuracy = evaluate(model)

    Both are computed from released gradients: there is nothing private about the shift. Checkpoints
    (``state_dict``, ``PrivateRun.save``) are taken outside of ``at_iterate``. An optimizer that
    knows its noise, ``DPAdamBC``, must know what the filter leaves of it: ``follow(training)``.

    Cost: two numbers for each parameter, and five passes over them.
    """

    def __init__(self, optimizer: Optimizer, kappa: float = 0.7) -> None:
        if not 0 < kappa <= 1:
            raise ValueError(f"DiSK: kappa must be in (0, 1], got {kappa}")
        self.kappa = kappa
        self.gamma = (1 - kappa) / kappa
        self.optimizer = optimizer
        self._variance = 1.0  # of the filtered noise, in units of the gradient's own
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups

    @property
    def noise_scale(self) -> float:
        """Noise of the filtered gradient, in units of the gradient's: sqrt(kappa / (2 - kappa)).

        More in the first steps; of noise that is the same in all of them.
        """
        return math.sqrt(self._variance)

    def follow(self, training: NoisyTraining) -> None:
        """Tell the optimizer, if it is one that asks, how much noise the filter leaves."""
        if isinstance(self.optimizer, DPAdamBC):
            noise = NoiseOf(training)
            self.optimizer.noise_std = lambda: self.noise_scale * noise()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Filter the gradients, let the optimizer step from x_t, and go to the next shifted point.

        Raises ValueError for a closure, which would ask for gradients at other points.
        """
        if closure is not None:
            raise ValueError(
                "DiSK.step: it takes no closure, whose gradients would be at other points; call "
                "backward(), then step()"
            )
        pairs = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        parameters, gradients = [p for p, _ in pairs], [g for _, g in pairs]
        if not pairs:
            return
        iterates, filtered = self._filter(parameters, gradients)
        torch._foreach_copy_(parameters, iterates)
        try:
            for p, gradient in zip(parameters, filtered, strict=True):
                p.grad = gradient
            self.optimizer.step()
        finally:
            for p, gradient in pairs:
                p.grad = gradient
        moved = torch._foreach_sub(parameters, iterates)
        torch._foreach_copy_(iterates, parameters)
        torch._foreach_add_(parameters, moved, alpha=self.gamma)

    def _filter(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return x_t and g_t; in the first step the parameters and gradients, copied."""
        if not self.state:
            for p, gradient in zip(parameters, gradients, strict=True):
                self.state[p] = {"iterate": p.detach().clone(), "filtered": gradient.clone()}
        else:
            self._variance = (1 - self.kappa) ** 2 * self._variance + self.kappa**2
        for p in parameters:
            if p not in self.state:
                raise RuntimeError(
                    f"DiSK.step: a parameter of shape {list(p.shape)} has its first gradient after "
                    "the first step; all of them are filtered together: build a new DiSK"
                )
        filtered = [self.state[p]["filtered"] for p in parameters]
        torch._foreach_lerp_(filtered, gradients, self.kappa)
        return [self.state[p]["iterate"] for p in parameters], filtered

    @contextmanager
    def at_iterate(self) -> Iterator[None]:
        """Have x_t in the parameters, for an evaluation, and then the shifted point again."""
        parameters = [p for p in self._parameters() if p in self.state]
        shifted = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.copy_(self.state[p]["iterate"])
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, shifted, strict=True):
                    p.copy_(value)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the filter's state and, under ``optimizer``, that of the optimizer."""
        return super().state_dict() | {
            "optimizer": self.optimizer.state_dict(),
            "variance": self._variance,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after a checkpoint, with the parameters at the shifted point as they were saved."""
        own = {key: state_dict[key] for key in ("state", "param_groups")}
        super().load_state_dict(own)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups = self.optimizer.param_groups
        self._variance = state_dict["variance"]
