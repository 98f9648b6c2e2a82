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
from dpkernels.postprocess.noise_level import NoiseOf, NoiseStd, NoisyTraining, current


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

    Both are computed from released gradients: there is nothing private about the shift. Steps and
    checkpoints (``state_dict``, ``PrivateRun.save``) are refused inside of ``at_iterate``.

    A ``DPAdamBC`` as the optimizer is told what the filter leaves of the noise, whether it was to
    follow the training itself, had a number, or ``follow(training)`` is called here::

        v_t = (1 - kappa)^2 v_(t-1) + kappa^2 noise_std_t^2,  v_1 = noise_std_1^2

    Cost: two numbers for each parameter, in its own precision, and five passes over them.
    """

    def __init__(self, optimizer: Optimizer, kappa: float = 0.7) -> None:
        if not 0 < kappa <= 1:
            raise ValueError(f"DiSK: kappa must be in (0, 1], got {kappa}")
        self.kappa = kappa
        self.gamma = (1 - kappa) / kappa
        self.optimizer = optimizer
        self.noise_std: NoiseStd | None = None  # of the private gradient
        self._variance = 0.0  # of the filtered noise, if it is known
        self._evaluated = False  # whether parameters are at x_t, by at_iterate
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups

    def filtered_noise_std(self) -> float:
        """Return the standard deviation of the noise on every element of g_t; 0 if not known."""
        return math.sqrt(self._variance)

    def follow(self, training: NoisyTraining) -> None:
        """Take the noise of every gradient from the training that releases it, schedules too."""
        self.noise_std = NoiseOf(training)
        if isinstance(self.optimizer, DPAdamBC):
            self.optimizer.noise_std = self.filtered_noise_std

    def _take_over_noise(self) -> None:
        """Stand between the noise and an optimizer that knows it, however it was told.

        Raises RuntimeError if nobody has told it.
        """
        inner = self.optimizer
        if not isinstance(inner, DPAdamBC) or inner.noise_std == self.filtered_noise_std:
            return
        if inner.noise_std is None:
            raise RuntimeError(
                "DiSK.step: the noise that DPAdamBC is to take out is not known; call "
                "follow(training) with what make_private returned, or pass DPAdamBC its noise_std"
            )
        self.noise_std, inner.noise_std = inner.noise_std, self.filtered_noise_std

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Filter the gradients, let the optimizer step from x_t, and go to the next shifted point.

        Raises ValueError for a closure, which would ask for gradients at other points, RuntimeError
        inside of ``at_iterate``, and if there is no gradient at all.
        """
        if closure is not None:
            raise ValueError(
                "DiSK.step: it takes no closure, whose gradients would be at other points; call "
                "backward(), then step()"
            )
        self._check_shifted("step")
        self._take_over_noise()
        pairs = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        parameters, gradients = [p for p, _ in pairs], [g for _, g in pairs]
        if not pairs:
            raise RuntimeError(
                "DiSK.step: no parameter has a gradient; call backward() first, and pass the DiSK "
                "itself to make_private, not the optimizer that is inside of it"
            )
        iterates, filtered = self._filter(parameters, gradients)
        _copy(parameters, iterates)
        try:
            for p, gradient in zip(parameters, filtered, strict=True):
                p.grad = gradient
            self.optimizer.step()
        finally:
            for p, gradient in pairs:
                p.grad = gradient
        moved = torch._foreach_sub(parameters, iterates)
        _copy(iterates, parameters)
        torch._foreach_add_(parameters, moved, alpha=self.gamma)

    def _filter(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return x_t and g_t; in the first step the parameters and gradients, copied."""
        noise = 0.0 if self.noise_std is None else current("DiSK.step", self.noise_std)
        if not self.state:
            self._variance = noise**2
            for p, gradient in zip(parameters, gradients, strict=True):
                self.state[p] = {"iterate": p.detach().clone(), "filtered": gradient.clone()}
        else:
            self._variance *= (1 - self.kappa) ** 2
            self._variance += (self.kappa * noise) ** 2
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
        before, self._evaluated = self._evaluated, True
        with torch.no_grad():
            for p in parameters:
                p.copy_(self.state[p]["iterate"])
        try:
            yield
        finally:
            self._evaluated = before
            with torch.no_grad():
                for p, value in zip(parameters, shifted, strict=True):
                    p.copy_(value)

    def _check_shifted(self, name: str) -> None:
        if self._evaluated:
            raise RuntimeError(
                f"DiSK.{name}: inside of at_iterate() parameters are not at the point where the "
                "next gradient is to be; train and save checkpoints outside of it"
            )

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the filter's state and, under ``optimizer``, that of the optimizer.

        Raises RuntimeError inside of ``at_iterate``: the parameters beside it would be others.
        """
        self._check_shifted("state_dict")
        return super().state_dict() | {
            "optimizer": self.optimizer.state_dict(),
            "noise_variance": self._variance,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after a checkpoint, with the parameters at the shifted point as they were saved."""
        own = {key: state_dict[key] for key in ("state", "param_groups")}
        super().load_state_dict(own)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups = self.optimizer.param_groups
        self._variance = state_dict["noise_variance"]


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy each; ``torch._foreach_copy_`` takes no shards of FSDP2."""
    for x, y in zip(to, values, strict=True):
        x.copy_(y)
