# mypy: disable-error-code="import-not-found, misc"
"""Rounds of federated averaging in pfl-research: SimulatedBackend, one process, PyTorch.

A client takes the steps of its local SGD by autograd. pfl has no clipping of records: it clips the
client's whole update, which protects a user and needs no record's gradient.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor

from benchmarks.federated.peers.asked import answer, parse
from benchmarks.federated.peers.tasks import Classifier
from benchmarks.federated.workload import NOISE_MULTIPLIER


class Model(Classifier):
    """With the metrics that pfl asks for; they are computed in the first round only."""

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Return the summed loss of a client."""
        return {"loss": Weighted(self.loss(x, y).item() * len(x), len(x))}


class Clock(TrainingProcessCallback):
    """The time at the end of every round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        """Note the time; never stop."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Run the rounds and print their seconds."""
    asked = parse()
    task, size = asked.task, asked.task.size
    x, labels = task.records()
    users = {
        str(client): PyTorchTensorDataset((x[client], labels[client]), user_id=str(client))
        for client in range(size.clients)
    }
    # Every user once before any comes again: with cohorts of all users, all in every round.
    sampler = get_user_sampler("minimize_reuse", list(users))
    data = FederatedDataset(lambda user: users[user], sampler)
    spread = NOISE_MULTIPLIER
    if asked.noise == "local":
        spread /= size.clients**0.5
    mechanism = GaussianMechanism(task.clip, spread)
    module = Model(task.network())
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    central = asked.noise == "central"
    privacy = CentrallyAppliedPrivacyMechanism(mechanism) if central else mechanism
    backend = SimulatedBackend(data, data, postprocessors=[WeightByUser(), privacy])
    clock = Clock()
    before = task.mean_loss(module)
    rounds = asked.rounds + 1
    FederatedAveraging().run(
        # Round 0 is always evaluated, later ones only as often as this says: never.
        NNAlgorithmParams(rounds, rounds, size.clients, None),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task.lr, local_batch_size=task.batch
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    after = task.mean_loss(module)
    answer(clock.times, (before, after), ("pfl", "torch", "dp-accounting", "numpy"))


if __name__ == "__main__":
    main()
