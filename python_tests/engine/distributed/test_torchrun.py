"""A script under ``torchrun``, as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dpkernels

SCRIPT = Path(__file__).with_name("torchrun_script.py")


def test_a_script_under_torchrun_trains_one_model_on_all_ranks():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join([str(Path(dpkernels.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if "rank" in line)
    right, values = zip(*(text.split(" ", 1) for text in said.values()), strict=True)
    assert sorted(said) == ["rank 0", "rank 1"]
    assert len(set(values)) == 1
    # The classes are six standard deviations apart; without training half would be right.
    assert all(float(part) > 0.9 for part in right)
