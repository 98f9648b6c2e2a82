"""What clients do by themselves: train and release how far they came, or release each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.algorithms.gradients import MOST, gradient_query
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Algorithm, Query, Stage, Tensors, Terms, Visit
from dpkernels.federated.problem import LocalSGD
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True)
class LocalTraining(Algorithm):
    """Delta_k = w - w0 after ``local_epochs`` of SGD, clipped as a whole to ``clip``, with noise.

    Unit user: whatever the records are, an upload has norm ``clip`` at most before its noise, so a
    user more or less moves it, and the sum, by ``clip`` at most.

    lr: of the server, on the mean of the uploads. local_epochs, local_batch, local_lr,
    local_momentum: of the clients' own SGD.
    """

    lr: float = 0.1
    clip: float = 1.0
    local_epochs: int = 5
    local_batch: int = 64
    local_lr: float = 0.1
    local_momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None:  # where a subclass finds the rate itself
                check_finite(type(self).__name__, name, value, above=0.0)
        _ = self.local  # or a ValueError that names what is wrong

    @property
    def local(self) -> LocalSGD:
        """What a client does by itself."""
        return LocalSGD(self.local_epochs, self.local_batch, self.local_lr, self.local_momentum)

    def stages(self, terms: Terms) -> tuple[Stage, ...]:
        """Return T rounds of clipped updates."""
        if terms.unit != "user":
            raise ValueError(
                f"{type(self).__name__}: local training without noise protects users, got unit "
                f"{terms.unit!r}; take unit 'user', or LocalDPSGD"
            )
        return (Stage("update", Query(terms.shape, self.clip), terms.rounds),)

    def client(self, visit: Visit) -> tuple[Tensor, Tensors]:
        """Return noisy clipped updates from where each client was told to start."""
        moved = visit.problem.local_updates(
            visit.cohort, visit.sent["theta"], self.local, visit.seeds()
        )
        return visit.noisy(clip_rows(moved, self.clip)), {}


def check_steps(name: str, steps: int) -> None:
    """Raise ValueError unless there are local steps."""
    if steps < 1:
        raise ValueError(f"{name}: local_steps must be >= 1, got {steps}")


def private_steps(visit: Visit, clip: float, steps: int, lr: float) -> Tensor:
    """Return y - theta after DP-SGD inside each client, ``[k, *shape]``.

    Each step draws its records anew: y <- y - lr (noisy sum of gradients clipped to ``clip``) / B,
    B the public expected number of records in a step.
    """
    theta = visit.sent["theta"]
    start = theta.expand(len(visit.cohort), *visit.terms.shape)
    y, cohort, most = start, visit.cohort, MOST * visit.terms.records
    with torch.random.fork_rng(devices=[]):
        # Of dropout alone: without it, nothing here depends on chance but records and noise.
        torch.manual_seed(int(visit.seeds().sum()))
        for step in range(steps):
            cohort = visit.draw() if step else visit.cohort
            sums = visit.problem.clipped_gradient_sums(cohort, y, clip, most)
            y = y - lr * visit.noisy(sums.div_(visit.terms.records))
    return y - start


def private_steps_stage(terms: Terms, clip: float, steps: int) -> Stage:
    """Return what ``private_steps`` releases: a noisy gradient in each step."""
    query = gradient_query(terms, clip)
    return Stage("step", query, terms.rounds, releases=steps, uploaded=False, redrawn=True)


def several_steps(terms: Terms, steps: int) -> str | None:
    """Return why ``private_steps`` have no guarantee where only the sum is seen, if so."""
    if terms.unit == "user" or terms.view == "each_upload" or steps == 1:
        return None
    return (
        "several local steps at record level under 'aggregate' are the paper's: a later step "
        "depends on the client's own share of the noise, which is too little by itself"
    )
