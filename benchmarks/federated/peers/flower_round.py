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

import torch

from benchmarks.federated.peers.asked import Asked, Softmax, answer, parse
from benchmarks.federated.workload import CLIP, LR, NOISE_MULTIPLIER, mean_loss, records_of


def _simulate(asked: Asked, folder: str) -> tuple[list[float], torch.Tensor]:
    """Return the clock at the end of every round, and the weights after the last."""
    from flwr.app import ArrayRecord, Context, MetricRecord
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
    from flwr.simulation import run_simulation

    from benchmarks.federated.peers import flower_apps

    size, times, weights = asked.size, [], [torch.empty(0)]
    strategy: Any = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=size.clients,
        min_evaluate_nodes=0,
        min_available_nodes=size.clients,
    )
    if asked.noise == "central":
        strategy = DifferentialPrivacyClientSideFixedClipping(
            strategy, NOISE_MULTIPLIER, LR * CLIP, size.clients
        )

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round:
            times.append(time.perf_counter())
            weights[0] = arrays.to_torch_state_dict()["linear.weight"]
        return None

    server = ServerApp()

    @server.main()
    def start(grid: Grid, context: Context) -> None:
        model = Softmax(size.features, size.classes)
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
    return times, weights[0]


def main() -> None:
    """Run the rounds and print their seconds."""
    asked = parse()
    if os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0":
        sys.exit("flower_round: Ray would listen on every interface; run it by environments.run")
    os.environ["DPKERNELS_PEER_SIZE"] = ",".join(map(str, asked.size.parameters.values()))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        times, weights = _simulate(asked, folder)
    x, labels = records_of(asked.size)
    losses = mean_loss(x, labels, torch.zeros_like(weights)), mean_loss(x, labels, weights)
    answer(times, losses, ("flwr", "ray", "torch", "numpy"))


if __name__ == "__main__":
    main()
