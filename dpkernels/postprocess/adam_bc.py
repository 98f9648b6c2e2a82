"""DP-AdamBC: Adam whose second moment is that of the gradient, without the noise's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from dpkernels.ops.checks import check_finite
from dpkernels.postprocess.noise_level import NoiseOf, NoiseStd, NoisyTraining, current

# Of the noise's variance. Chosen, with a rate of 5e-4, among four on the last 10,000 of MNIST's and
# FashionMNIST's training images, behind DP-KFC at epsilon 1.
_FLOOR = 0.1
# Where there is no noise: the square of Adam's eps.
_LEAST = 1e-16
# Adam's own names, in the order m, v.
_MOMENTS = ("exp_avg", "exp_avg_sq")


class DPAdamBC(Optimizer):
    """Adam with the noise's variance taken out of its second moment (Tang et al. 2024).

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  n <- b2 n + (1 - b2) noise_std^2
    w <- w - lr m_hat / sqrt(max(v_hat - n_hat, floor)),  hats: divided by 1 - b^t

    With noise that is the same in all steps, n_hat is its variance (sigma C / B)^2, as in the
    paper; n follows a schedule, so that v_hat - n_hat stays unbiased. Without noise, and where
    v_hat is above the floor, this is ``torch.optim.Adam`` with eps = 0, bit for bit.

    params, lr, betas: as for Adam.
    noise_std: standard deviation of the noise on every element of a gradient, sigma C / B, or what
        returns that of the gradient that is there now. None: ``follow`` says it later.
    floor: gamma' of the paper, in units of squared gradients; there, the step is
        lr m_hat / sqrt(floor). The smaller it is, the larger are the steps of elements whose
        gradient is lost in the noise. None: a tenth of n_hat, so that it goes along with sigma, C
        and B. Noise alone spreads v_hat by n_hat sqrt(2 / t), and n_hat sqrt(1 - b2) in the end,
        a thirtieth: what is below a tenth is mostly noise. Elements at this floor move 3.2 times as
        far as with Adam at the same rate, hence a lower default.

    With ``make_private``, which needs the optimizer first::

        optimizer = DPAdamBC(model.parameters(), lr=5e-4)
        training = make_private(model, optimizer, ...)
        optimizer.follow(training)

    Cost: two numbers for each parameter, float32 or wider, and the memory traffic of Adam plus one
    pass. In half precision v would stand still where a gradient is to move it by 1 - b2 = 0.001 of
    itself, at most a quarter of an ulp of bfloat16, and v - n would be rounding errors.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 5e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        noise_std: NoiseStd | None = None,
        floor: float | None = None,
    ) -> None:
        check_finite("DPAdamBC", "lr", lr, at_least=0.0)
        if floor is not None:
            check_finite("DPAdamBC", "floor", floor, above=0.0)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"DPAdamBC: betas must be two numbers in [0, 1), got {betas}")
        if isinstance(noise_std, int | float):
            current("DPAdamBC", noise_std)
        self.noise_std = noise_std
        # Steps and noise are those of a group: all of its gradients come at once.
        defaults = {"lr": lr, "betas": betas, "floor": floor, "steps": 0, "noise_moment": 0.0}
        super().__init__(params, defaults)

    def follow(self, training: NoisyTraining) -> None:
        """Take the noise of every gradient from the training that releases it, schedules too."""
        self.noise_std = NoiseOf(training)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters.

        Raises RuntimeError if the noise is not known, or if a parameter that requires grad has no
        gradient: the noise of a group is counted once for all.
        """
        if self.noise_std is None:
            raise RuntimeError(
                "DPAdamBC.step: noise_std is not known; call follow(training) with what "
                "make_private returned, or pass noise_std"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        noise_variance = current("DPAdamBC.step", self.noise_std) ** 2
        for group in self.param_groups:
            _update(group, *self._tensors(group), noise_variance)
        return loss

    def _tensors(
        self, group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Return parameters, gradients, first and second moments."""
        parameters = [p for p in group["params"] if p.requires_grad]
        for p in parameters:
            if p.grad is None:
                raise RuntimeError(
                    f"DPAdamBC.step: a parameter of shape {list(p.shape)} has no gradient; call "
                    "backward() first, or requires_grad_(False) what is not trained"
                )
            if not self.state[p]:
                wide = torch.promote_types(p.dtype, torch.float32)
                for moment in _MOMENTS:
                    self.state[p][moment] = torch.zeros_like(p, dtype=wide)
        means, squares = ([self.state[p][moment] for p in parameters] for moment in _MOMENTS)
        gradients = [p.grad.to(m.dtype) for p, m in zip(parameters, means, strict=True)]
        return parameters, gradients, means, squares

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after a checkpoint; moments keep their precision, which torch would round away."""
        super().load_state_dict(state_dict)
        saved = (key for group in state_dict["param_groups"] for key in group["params"])
        own = (p for group in self.param_groups for p in group["params"])
        for key, p in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[p][name] = value.to(p.device, copy=True)


def _update(
    group: dict[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    noise_variance: float,
) -> None:
    beta1, beta2 = group["betas"]
    group["steps"] += 1
    group["noise_moment"] += (1 - beta2) * (noise_variance - group["noise_moment"])
    if not parameters:
        return
    correction1 = 1 - beta1 ** group["steps"]
    correction2 = 1 - beta2 ** group["steps"]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    # The correction is common to v and n, and divided by after the root, as Adam does.
    roots = torch._foreach_sub(squares, group["noise_moment"])
    torch._foreach_clamp_min_(roots, _floor(group, correction2) * correction2)
    torch._foreach_sqrt_(roots)
    torch._foreach_div_(roots, correction2**0.5)
    torch._foreach_addcdiv_(parameters, means, roots, -group["lr"] / correction1)


def _floor(group: dict[str, Any], correction2: float) -> float:
    """Return what is divided by at least, squared, in units of v_hat."""
    if group["floor"] is not None:
        return float(group["floor"])
    noise: float = group["noise_moment"] / correction2
    return max(_LEAST, _FLOOR * noise)
