"""UDP-FedAvg: user-level private federated averaging, and what is known of its noise put to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from dpkernels.federated.algorithms.averaging import (
    add_iterate,
    averaged,
    check_average,
    start_average,
)
from dpkernels.federated.algorithms.local_training import LocalTraining
from dpkernels.federated.contract import Seen, Stage, Tensors, Terms
from dpkernels.federated.shrinking import SHRINKS, Shrink, groups, shrunken

Shrunk = Literal["sum", "update", "filtered"]


@dataclass(frozen=True)
class UDPFedAvg(LocalTraining):
    """v <- momentum v + G;  theta <- theta + lr_t v;  G the mean of noisy clipped updates.

    Unit user; ``LocalTraining`` has the client's part. All that the server does is post-processing
    of G, sound in every view.

    momentum: in [0, 1). decay: lr_t = lr decay^(t - 1), in (0, 1]. average: the share of the last
        rounds whose iterates are averaged.
    shrink: by what the known noise is taken out: ``none``, ``scalar`` (one James-Stein factor),
        ``energy`` (its root), ``layer`` (one a layer), ``spectral`` (singular values of each layer,
        after Gavish and Donoho).
    shrunk: what it is taken out of.
        ``sum``: M = sum of lr_t v so far, kept as it is; clients get W(0) + shrink(M).
        ``update``: each v, which with momentum is a mean of the last rounds.
        ``filtered``: no factor on a value but a Kalman gain on its change, for ``scalar`` and
            ``layer``. S <- S + k (G - S), theta <- theta + lr_t S; k = p / (p + r) with r the
            variance of the noise in G, and p that of the error of S before the round: what the mean
            square of G - S was above r, over all rounds so far. Without momentum.
    """

    name: ClassVar[str] = "udp-fedavg"
    momentum: float = 0.0
    decay: float = 1.0
    average: float = 0.0
    shrink: Shrink = "none"
    shrunk: Shrunk = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"UDPFedAvg: momentum must be in [0, 1), got {self.momentum}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"UDPFedAvg: decay must be in (0, 1], got {self.decay}")
        check_average("UDPFedAvg", self.average)
        for name, known in (("shrink", SHRINKS), ("shrunk", get_args(Shrunk))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"UDPFedAvg: {name} must be one of {', '.join(known)}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.shrunk == "filtered" and (self.momentum or self.shrink in ("energy", "spectral")):
            raise ValueError(
                "UDPFedAvg: shrunk='filtered' is for shrink='scalar' or 'layer' without momentum, "
                f"got {self.shrink!r} and {self.momentum}"
            )

    def server_start(self, terms: Terms, theta: Tensor) -> Tensors:
        """Return theta, the round, the velocity, and what shrinking and averaging need."""
        start = {"theta": theta, "round": torch.tensor(0), "velocity": torch.zeros_like(theta)}
        if self.shrink != "none":
            start["noise"] = torch.zeros(3, dtype=torch.float64)
            if self.shrunk == "sum":
                start |= {"first": theta, "moved": torch.zeros_like(theta, dtype=torch.float64)}
            if self.shrunk == "filtered":
                parts = groups(self.shrink, terms.layers, theta.numel())
                start["excess"] = torch.zeros(len(parts), dtype=torch.float64)
        return start | start_average(theta, self.average)

    def server(self, stage: Stage, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Take one step."""
        rate = self.lr * self.decay ** int(server["round"])
        state = {**server, "round": server["round"] + 1}
        if self.shrink != "none" and self.shrunk == "filtered":
            state |= self._filtered(terms, server, seen)
        else:
            state["velocity"] = seen.mean.add(server["velocity"], alpha=self.momentum)
        velocity = state["velocity"]
        if self.shrink == "none" or self.shrunk == "filtered":
            theta = server["theta"].add(velocity, alpha=rate)
        else:
            state["noise"] = self._noise(server["noise"], rate, seen.std or 0.0)
            of_velocity, _, of_sum = state["noise"].tolist()
            if self.shrunk == "update":
                step = shrunken(self.shrink, terms.layers, velocity, of_velocity)
                theta = server["theta"].add(step, alpha=rate)
            else:
                state["moved"] = server["moved"].add(velocity, alpha=rate)
                moved = state["moved"].to(velocity.dtype)
                step = shrunken(self.shrink, terms.layers, moved, of_sum)
                theta = (server["first"] + step).to(velocity.dtype)
        state["theta"] = theta
        return state | add_iterate(server, theta, self.average, terms.rounds)

    def _noise(self, noise: Tensor, rate: float, std: float) -> Tensor:
        """Return var(v), cov(v, M) and var(M) of the noise in an element after a round.

        v' = momentum v + G and M' = M + rate v': linear in noise that is independent of the past.
        Without momentum var(M) is the sum of (rate std)^2.
        """
        velocity, both, total = noise.tolist()
        velocity = self.momentum**2 * velocity + std**2
        carried = self.momentum * both
        total += 2 * rate * carried + rate**2 * velocity
        return torch.tensor([velocity, carried + rate * velocity, total], dtype=torch.float64)

    def _filtered(self, terms: Terms, server: Tensors, seen: Seen) -> Tensors:
        """Return S as the velocity, and the sum of what innovations had beyond the noise."""
        before = server["velocity"].flatten()
        innovation = seen.mean.flatten() - before
        estimate, excess = before.clone(), server["excess"].clone()
        variance, rounds = (seen.std or 0.0) ** 2, int(server["round"]) + 1
        for index, part in enumerate(groups(self.shrink, terms.layers, len(before))):
            excess[index] += float(innovation[part].double().square().mean()) - variance
            prior = max(0.0, float(excess[index]) / rounds)
            gain = prior / (prior + variance) if variance else 1.0
            estimate[part] += gain * innovation[part]
        return {"velocity": estimate.view_as(seen.mean), "excess": excess}

    def model(self, server: Tensors) -> Tensor:
        """Return the average of the last iterates, or the last one."""
        return averaged(server)
