"""Batches on the device that Accelerate trains on, where a script uses it."""

from __future__ import annotations

import sys
from typing import Any


def placed(batch: Any) -> Any:
    """Return ``batch`` on Accelerate's device; as it is in a process without an ``Accelerator``.

    Scripts for Accelerate do not move batches: its loaders do, and ``PrivateLoader`` stands in for
    one. The module is not imported here: without it there is no ``Accelerator``.
    """
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return batch
    utils: Any = sys.modules["accelerate.utils"]
    return utils.send_to_device(batch, state.AcceleratorState().device)
