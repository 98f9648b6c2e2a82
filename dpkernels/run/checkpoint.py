"""Checkpoints of a private run: written as a whole or not at all, and resumed at the same epsilon.

Each of several processes writes a file of its own, beside which the new one stands until all have
written theirs, so that there is always one step that all of them have.

A run that is resumed repeats the steps after its last checkpoint with other noise, and counts them
once. That is right as long as nobody saw the models of the steps that were lost; whoever publishes
models as they are made writes a checkpoint before publishing each.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dpkernels.run.private_run import PrivateRun

_FORMAT = 1


def save(
    path: str | os.PathLike[str], run: PrivateRun, *, scheduler: Any = None, extra: Any = None
) -> None:
    """Write model, optimizer, scheduler, accountant, loader, noise and torch's generators.

    path: of the file; of several processes, each appends ``.rank0`` and so on. All must call it.
    extra: the caller's own, of tensors, numbers, strings, lists and dicts.

    Keys from the operating system are not written: whoever read them could subtract the noise.
    """
    if run.training.samples:
        raise RuntimeError(
            "save: it cannot be called between backward() and step(): sums without noise are not "
            "written; call it after step()"
        )
    state = {
        "format": _FORMAT,
        "model": run.training.model.state_dict(),
        "optimizer": run.training.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "run": run.state_dict(),
        "generators": _generators(),
        "extra": extra,
    }
    ranks = run.training.ranks
    if ranks.size == 1:
        write_atomically(path, state)
        return
    old, new = _files(path, ranks.rank)
    write_atomically(new, state)
    ranks.gathered()
    os.replace(new, old)


def load(path: str | os.PathLike[str], run: PrivateRun, *, scheduler: Any = None) -> Any:
    """Put everything back that ``save`` wrote; return its ``extra``.

    Noise goes on with a key of its own, or, from a fixed seed, with the next counter.
    """
    state = _read(path) if run.training.ranks.size == 1 else _latest_of_all(path, run)
    if (state["scheduler"] is None) is not (scheduler is None):
        there = "has none" if state["scheduler"] is None else "has one"
        raise ValueError(f"load: scheduler must be given as it was to save(), which {there}")
    run.training.model.load_state_dict(state["model"])
    run.training.optimizer.load_state_dict(state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    run.load_state_dict(state["run"])
    _set_generators(state["generators"])
    return state["extra"]


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ValueError(f"load: {os.fspath(path)} is not a checkpoint of a private run")
    return state


def _files(path: str | os.PathLike[str], rank: int) -> tuple[Path, Path]:
    """Return where a rank's checkpoint is, and where it is until all have written theirs."""
    own = f"{os.fspath(path)}.rank{rank}"
    return Path(own), Path(f"{own}.new")


def _latest_of_all(path: str | os.PathLike[str], run: PrivateRun) -> dict[str, Any]:
    """Return this rank's state of the last step that all ranks have."""
    ranks = run.training.ranks
    there = [_read(file) for file in _files(path, ranks.rank) if file.exists()]
    own = {state["run"]["training"]["steps"]: state for state in there}
    common = set.intersection(*map(set, ranks.gathered(list(own))))
    if not common:
        raise FileNotFoundError(
            f"load: {os.fspath(path)} has no checkpoint that all {ranks.size} ranks wrote; start "
            "as many processes as wrote it"
        )
    return own[max(common)]


def write_atomically(path: str | os.PathLike[str], state: Any) -> None:
    """Write ``state`` so that ``path`` holds the old or the new whole, whenever power is cut."""
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    # The new name is on the disk only when the folder is.
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _generators() -> dict[str, Any]:
    """Return torch's own generators: dropout goes on as it would have."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
