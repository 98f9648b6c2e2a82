"""All scenarios in one set of processes for each number of them, for all workers."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
import torch

from python_tests.engine.distributed import scenarios, sharded_scenarios
from python_tests.engine.distributed.processes import run


@pytest.fixture(scope="session", params=[2, 4], ids=["2 processes", "4 processes"])
def ranks(request, tmp_path_factory):
    """Return what each scenario returned on each rank, by its name."""
    world = request.param
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks{world}"
    folder.mkdir(exist_ok=True)
    results = folder / "results.pt"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            fresh = Path(tempfile.mkdtemp(dir=folder))
            torch.save(run([*scenarios.ALL, *sharded_scenarios.ALL], world, fresh), results)
    return torch.load(results, weights_only=False)
