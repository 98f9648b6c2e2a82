"""A small classifier trained privately with canaries, for the audit of one run."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import dpkernels
from dpkernels.engine.clipping import Flat
from dpkernels.privacy.audit import loss_decrease
from python_tests.privacy.audit.broken import Unclipped

CANARIES = 200
STEPS = 16
RECORDS = 50
# So small that no canary is learnt so well that its gradient, 20 |p - y|, gets shorter than 1.
LEARNING_RATE = 0.002


@dataclass(frozen=True)
class Canaries:
    """Canary i has a feature of its own, so that its gradient is orthogonal to all others."""

    inputs: Tensor
    labels: Tensor

    @classmethod
    def made(cls) -> Canaries:
        features = 20 * torch.eye(CANARIES, CANARIES + 4)
        return cls(features, torch.arange(CANARIES) % 2)


def records() -> tuple[Tensor, Tensor]:
    """Return ordinary data: four features that tell two classes apart."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(RECORDS) % 2
    inputs = torch.zeros(RECORDS, CANARIES + 4)
    inputs[:, -4:] = torch.randn(RECORDS, 4, generator=generator) + 2 * labels[:, None]
    return inputs, labels


class Run:
    """One training: full batches, clipped to 1, ``STEPS`` steps of noise ``sigma``."""

    def __init__(self, sigma: float, *, clip: bool = True, actual_sigma: float | None = None):
        self.canaries = Canaries.made()
        self.model = nn.Linear(CANARIES + 4, 2, bias=False)
        nn.init.zeros_(self.model.weight)
        self.before = copy.deepcopy(self.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the fixed seed
            self.training = dpkernels.make_private(
                self.model,
                torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE),
                noise_multiplier=sigma,
                max_grad_norm=Flat(1.0) if clip else Unclipped(1.0),
                expected_batch_size=1.0,
                loss_reduction="sum",
                noise_key=dpkernels.NoiseKey.from_seed(3),
            )
        if actual_sigma is not None:
            step = self.training._step
            step.mechanism = dataclasses.replace(step.mechanism, noise_multiplier=actual_sigma)

    def step(self, included: Tensor) -> Tensor:
        """Take a step with these canaries; return the gradient that was released."""
        inputs, labels = records()
        inputs = torch.cat([inputs, self.canaries.inputs[included]])
        labels = torch.cat([labels, self.canaries.labels[included]])
        logits = self.model(inputs)
        nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        self.training.optimizer.step()
        return self.model.weight.grad

    def score_of_the_model(self, included: Tensor) -> Tensor:
        """Train with the canaries in every step, and look at the model in the end."""
        for _ in range(STEPS):
            self.step(included)
        return loss_decrease(self.before, self.model, self.canaries.inputs, self.canaries.labels)

    def score_of_the_gradients(self, included: Tensor, *, same_noise: bool = False) -> Tensor:
        """Train with the canaries in every second step, and compare neighbouring gradients.

        same_noise: the key is set back before every step.
        """
        key = self.training.noise_key
        start = key.state_dict()
        difference = torch.zeros_like(self.model.weight)
        for index in range(STEPS):
            if same_noise:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    key.load_state_dict(start)
            with_canaries = index % 2 == 0
            gradient = self.step(included & with_canaries)
            difference += gradient if with_canaries else -gradient
        # A canary's own gradient points against its label's row.
        own = difference[:, :CANARIES]
        sign = 1 - 2 * self.canaries.labels
        return sign * (own[1] - own[0])
