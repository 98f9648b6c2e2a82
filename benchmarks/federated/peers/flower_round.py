# mypy: disable-error-code="import-not-found, misc, untyped-decorator"
"""Rounds of federated averaging in Flower: ServerApp and ClientApp under its Ray simulation.

Nothing leaves the machine: telemetry is off, and Ray listens on the loopback address.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from typing import Any

from benchmarks.federated.peers.asked import Asked, answer, parse
from benchmarks.federated.peers.tasks import Classifier
from benchmarks.federated.workload import NOISE_MULTIPLIER


def _simulate(asked: Asked, folder: str) -> tuple[list[float], Classifier]:
    """Return the clock at the end of every round, and the model after the last."""
    from flwr.app import ArrayRecord, Context, MetricRecord
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
    from flwr.simulation import run_simulation

    from benchmarks.federated.peers import flower_apps

    task, size, times = asked.task, asked.task.size, []
    trained = Classifier(task.network())
    strategy: Any = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=size.clients,
        min_evaluate_nodes=0,
        min_available_nodes=size.clients,
    )
    if asked.noise == "central":
        strategy = DifferentialPrivacyClientSideFixedClipping(
            strategy, NOISE_MULTIPLIER, task.clip, size.clients
        )

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round:
            times.append(time.perf_counter())
            trained.load_state_dict(arrays.to_torch_state_dict())
        return None

    server = ServerApp()

    @server.main()
    def start(grid: Grid, context: Context) -> None:
        model = Classifier(task.network())
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=asked.rounds + 1,
            evaluate_fn=note,
        )

    run_simulation(
        server_app=server,
        client_app=flower_apps.central if asked.noise == "central" else flower_apps.local,
        num_supernodes=size.clients,
        backend_config={
            "client_resources": {"num_cpus": asked.cpus_per_client, "num_gpus": 0.0},
            "init_args": {
                "num_cpus": os.cpu_count(),
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": folder,
                "log_to_driver": False,
            },
        },
    )
    return times, trained


def main() -> None:
    """Run the rounds and print their seconds."""
    asked = parse()
    if os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0":
        sys.exit("flower_round: Ray would listen on every interface; run it by environments.run")
    task = asked.task
    numbers = task.size.parameters.values()
    os.environ["DPKERNELS_PEER_TASK"] = ",".join([task.workload, *map(str, numbers)])
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        times, trained = _simulate(asked, folder)
    losses = task.mean_loss(Classifier(task.network())), task.mean_loss(trained)
    answer(times, losses, ("flwr", "ray", "torch", "numpy"))


if __name__ == "__main__":
    main()
