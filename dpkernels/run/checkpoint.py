"""Checkpoints of a private run: written as a whole or not at all, and resumed at the same epsilon.

Each of several processes writes a file of its own, beside which the new one stands until all have
written theirs, so that there is always one step that all of them have.

A run that is resumed repeats the steps after its last checkpoint with other noise, and counts them
once. That is right as long as nobody saw the models of the steps that were lost; whoever publishes
models as they are made writes a checkpoint before publishing each.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

if TYPE_CHECKING:
    from dpkernels.engine import Ranks
    from dpkernels.run.private_run import PrivateRun

T = TypeVar("T")

_FORMAT = 1


def save(
    path: str | os.PathLike[str], run: PrivateRun, *, scheduler: Any = None, extra: Any = None
) -> None:
    """Write model, optimizer, scheduler, accountant, loader, noise and torch's generators.

    path: of the file; of several processes, each appends ``.rank0`` and so on. All must call it.
    extra: the caller's own, of tensors, numbers, strings, lists and dicts.

    Keys from the operating system are not written: whoever read them could subtract the noise.
    """
    ranks = run.training.ranks
    reason = (
        "save: it cannot be called between backward() and step(): sums without noise are not "
        "written; call it after step()"
        if run.training.microbatches
        else None
    )
    # The first rank's name for this checkpoint is everybody's; and all write it, or nobody.
    answers = ranks.gathered((secrets.token_hex(8), reason))
    _raise_first([answer[1] for answer in answers])
    state = {
        "format": _FORMAT,
        "name": answers[0][0],
        "model": run.training.model.state_dict(),
        "optimizer": run.training.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "run": run.state_dict(),
        "generators": _generators(),
        "extra": extra,
    }
    if ranks.size == 1:
        write_atomically(path, state)
        return
    old, new = _files(path, ranks.rank)
    _together(ranks, lambda: write_atomically(new, state))
    os.replace(new, old)


def load(path: str | os.PathLike[str], run: PrivateRun, *, scheduler: Any = None) -> Any:
    """Put everything back that ``save`` wrote; return its ``extra``.

    Noise goes on with a key of its own, or, from a fixed seed, with the next counter. If something
    does not fit, the model is left as it was, or epsilon is that of the checkpoint already.
    """
    state = _read(path) if run.training.ranks.size == 1 else _latest_of_all(path, run)
    if (state["scheduler"] is None) is not (scheduler is None):
        there = "has none" if state["scheduler"] is None else "has one"
        raise ValueError(f"load: scheduler must be given as it was to save(), which {there}")
    run.load_state_dict(state["run"])
    run.training.model.load_state_dict(state["model"])
    run.training.optimizer.load_state_dict(state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
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
    """Return this rank's part of the last checkpoint that all ranks have."""
    ranks = run.training.ranks
    files = [file for file in _files(path, ranks.rank) if file.exists()]
    states = _together(ranks, lambda: [_read(file) for file in files])
    own = {(s["run"]["training"]["steps"], s["name"]): s for s in states}
    common = set.intersection(*map(set, ranks.gathered(list(own))))
    if not common:
        raise FileNotFoundError(
            f"load: {os.fspath(path)} has no checkpoint that all {ranks.size} ranks wrote; start "
            "as many processes as wrote it"
        )
    return own[max(common)]


def _together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, if it fails on no rank; raise on all of them otherwise."""
    result, error = None, None
    try:
        result = work()
    except Exception as found:
        error = found
    reasons = ranks.gathered(error and f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    _raise_first(reasons)
    return cast(T, result)


def _raise_first(reasons: Sequence[str | None]) -> None:
    """Raise RuntimeError for the first rank that has a reason."""
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise RuntimeError(reason if len(reasons) == 1 else f"on rank {rank}: {reason}")


def write_atomically(path: str | os.PathLike[str], state: Any) -> None:
    """Write ``state`` so that ``path`` holds the old or the new whole, whenever power is cut."""
    target = Path(path)
    # One name, so that what a killed process leaves is overwritten by the next.
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
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
