"""Environments of the peers and the commands that run a round in them.

``build/peers`` is not committed. torch comes first and alone, as the CPU wheel that dpkernels uses:
the frameworks would otherwise choose a build with gigabytes of CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.federated.peers.tasks import Workload
from benchmarks.federated.workload import Size

_ROOT = Path(__file__).resolve().parent.parent.parent.parent
ENVIRONMENTS = _ROOT / "build" / "peers"
_TORCH = "torch==2.13.0"
_TIME_LIMIT = 600


@dataclass(frozen=True)
class Peer:
    """A framework: what is installed, and the module that runs its round."""

    name: str
    requirements: tuple[str, ...]
    module: str

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return ENVIRONMENTS / self.name / "bin" / "python"

    @property
    def prepared(self) -> bool:
        """Whether everything was installed."""
        return (ENVIRONMENTS / self.name / ".prepared").exists()


@dataclass(frozen=True)
class Setting:
    """One way to run a peer: arguments of its module, and what it does in a round."""

    peer: str
    arguments: tuple[str, ...]
    does: str


PEERS = {
    "pfl": Peer(
        "pfl",
        # pfl 0.6 imports names that dp-accounting 0.6 no longer has.
        ("pfl[pytorch]==0.6.*", "dp-accounting<0.6"),
        "benchmarks.federated.peers.pfl_round",
    ),
    "flwr": Peer("flwr", ("flwr[simulation]==1.41.*",), "benchmarks.federated.peers.flower_round"),
}
SETTINGS = (
    Setting(
        "pfl",
        ("--noise", "local"),
        "autograd, one SGD step; each client's update clipped and noised by the client",
    ),
    Setting(
        "pfl",
        ("--noise", "central"),
        "autograd, one SGD step; each client's update clipped, noise once on the sum",
    ),
    Setting(
        "flwr",
        ("--noise", "local", "--cpus-per-client", "1"),
        "autograd, one SGD step in Ray actors, one a core; update clipped and noised by LocalDpMod",
    ),
    Setting(
        "flwr",
        ("--noise", "central", "--cpus-per-client", "1"),
        "autograd, one SGD step in Ray actors, one a core; update clipped by fixedclipping_mod, "
        "noise once at the server",
    ),
    Setting(
        "flwr",
        ("--noise", "local", "--cpus-per-client", "2"),
        "the same as the first with Flower's default of two cores a client: one Ray actor",
    ),
)


_EPOCH = "autograd, a local epoch of SGD"
CIFAR_SETTINGS = (
    Setting(
        "pfl",
        ("--noise", "central"),
        f"{_EPOCH}; each client's update clipped, noise once on the sum",
    ),
    Setting(
        "flwr",
        ("--noise", "central", "--cpus-per-client", "1"),
        f"{_EPOCH} in Ray actors, one a core; update clipped by fixedclipping_mod, noise once at "
        "the server",
    ),
    Setting(
        "flwr",
        ("--noise", "central", "--cpus-per-client", "2"),
        "the same with Flower's default of two cores a client: one Ray actor",
    ),
)


def prepare() -> None:
    """Make the environments that are missing; network is needed for the package index."""
    for peer in PEERS.values():
        if peer.prepared:
            continue
        home = ENVIRONMENTS / peer.name
        venv.create(home, with_pip=True)
        for packages in ((_TORCH,), peer.requirements):
            command = [str(peer.python), "-m", "pip", "install", "-q", *packages]
            print(f"{peer.name}: pip install {' '.join(packages)}", file=sys.stderr, flush=True)
            subprocess.run(command, check=True)
        (home / ".prepared").touch()


def run(
    setting: Setting, size: Size, rounds: int, threads: int, workload: Workload = "softmax"
) -> dict[str, Any]:
    """Run a peer's rounds in its environment and return what its module printed.

    Raises RuntimeError if the environment is missing or the module fails.
    """
    peer = PEERS[setting.peer]
    if not peer.prepared:
        raise RuntimeError(
            f"{peer.name}: no environment; run python -m benchmarks.federated peers --prepare"
        )
    sizes = [part for name, value in size.parameters.items() for part in (f"--{name}", str(value))]
    command = [str(peer.python), "-m", peer.module, *sizes, "--rounds", str(rounds)]
    command += ["--workload", workload]
    done = subprocess.run(
        [*command, "--threads", str(threads), *setting.arguments],
        cwd=_ROOT,
        env=_surroundings(peer, threads),
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{peer.name} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _surroundings(peer: Peer, threads: int) -> dict[str, str]:
    """Return the variables a peer gets: no telemetry, a home of its own, nothing else of ours."""
    home = ENVIRONMENTS / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.pathsep.join([str(peer.python.parent), os.environ.get("PATH", "")]),
        "HOME": str(home),
        "OMP_NUM_THREADS": str(threads),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(home / "flwr"),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray puts the machine's address in the place of 127.0.0.1, and listens on every interface,
        # unless it is told that there is no cluster; the variable has its name from where that is
        # the default.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
