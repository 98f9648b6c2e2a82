"""DP-FedSOFIM: a natural gradient at the server with a rank-one (or rank-k) Fisher matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import client_gradients, gradient_query
from dpkernels.federated.contract import Algorithm, Seen, Stage, Tensors, Terms, Visit
from dpkernels.ops.checks import check_finite
from dpkernels.ops.sherman_morrison import sofim_step_, woodbury_solve


@dataclass(frozen=True)
class FedSOFIM(Algorithm):
    """M <- beta M + (1 - beta) G;  theta <- theta - lr (rho I + M M^T)^-1 G  (Algorithm 1).

    G is the mean of the clients' noisy gradients; everything after it is post-processing.

    lr, clip, rho: > 0. beta: in [0, 1).
    window: k >= 1 puts the mean of the last k gradients' outer products in place of M M^T.
    """

    name: ClassVar[str] = "fedsofim"
    lr: float = 0.1
    clip: float = 1.0
    rho: float = 0.5
    beta: float = 0.9
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "rho"):
            check_finite("FedSOFIM", name, getattr(self, name), above=0.0)
        if not 0 <= self.beta < 1:
            raise ValueError(f"FedSOFIM: beta must be in [0, 1), got {self.beta}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"FedSOFIM: window must be >= 1 or None, got {self.window}")

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds of gradients."""
        return (Stage("gradient", gradient_query(terms, self.clip), terms.rounds),)

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta, and M or the last gradients ``[0, d]``."""
        if self.window is None:
            return {"theta": theta, "momentum": torch.zeros_like(theta)}
        return {"theta": theta, "window": theta.new_zeros(0, theta.numel())}

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy gradients at theta."""
        return visit.noisy(client_gradients(visit, visit.sent["theta"], self.clip)), {}

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take one preconditioned step."""
        theta = server["theta"].clone()
        if self.window is None:
            momentum = server["momentum"].clone()
            sofim_step_(theta, momentum, seen.mean, beta=self.beta, rho=self.rho, lr=self.lr)
            return {"theta": theta, "momentum": momentum}
        gradient = seen.mean.flatten()
        window = torch.cat((server["window"], gradient.unsqueeze(0)))[-self.window :]
        step = woodbury_solve(window / len(window) ** 0.5, gradient, rho=self.rho)
        return {"theta": theta.sub_(step.view_as(theta), alpha=self.lr), "window": window}
