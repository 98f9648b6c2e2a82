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
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from dpkernels.whole_file import whole_file

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
    _raise_first(ranks.gathered(reason))
    state = {
        "format": _FORMAT,
        "model": run.training.model.state_dict(),
        "optimizer": run.training.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "run": run.state_dict(),
        "generators": _generators(),
        "extra": extra,
    }
    if ranks.size == 1:
        write_atomically(path, state)
    else:
        write_own_part(path, state, run.training.steps, ranks)


def load(path: str | os.PathLike[str], run: PrivateRun, *, scheduler: Any = None) -> Any:
    """Put everything back that ``save`` wrote; return its ``extra``.

    Noise goes on with a key of its own, or, from a fixed seed, with the next counter. If something
    does not fit, the model is left as it was, or epsilon is that of the checkpoint already.
    """
    ranks = run.training.ranks
    state = read(path) if ranks.size == 1 else read_own_part(path, ranks)
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ValueError(f"load: {os.fspath(path)} is not a checkpoint of a private run")
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


def read(path: str | os.PathLike[str] | IO[bytes], **options: Any) -> Any:
    """Return what ``write_atomically`` wrote; options: as ``torch.load`` takes them.

    Raises ValueError for a file that cannot be read as one.
    """
    try:
        return torch.load(path, **{"map_location": "cpu", "weights_only": True, **options})
    except OSError:
        raise
    except Exception as error:  # bytes that are no checkpoint make torch raise anything
        name = os.fspath(path) if isinstance(path, str | os.PathLike) else "the file"
        raise ValueError(f"{name} cannot be read as a checkpoint: {error}") from error


def write_own_part(
    path: str | os.PathLike[str], state: Any, steps: int, ranks: Ranks, **options: Any
) -> None:
    """Write this rank's part of a checkpoint after ``steps`` steps; all ranks must call it."""
    # The first rank's name for this checkpoint is everybody's: a later attempt has another.
    name = ranks.gathered(secrets.token_hex(8))[0]
    part = {"name": name, "steps": steps, "state": state}
    old, new = _files(path, ranks.rank)
    _together(ranks, lambda: write_atomically(new, part, **options))
    os.replace(new, old)


def read_own_part(path: str | os.PathLike[str], ranks: Ranks, **options: Any) -> Any:
    """Return this rank's part of the last checkpoint that all ranks have."""
    files = [file for file in _files(path, ranks.rank) if file.exists()]
    parts = _together(ranks, lambda: [read(file, **options) for file in files])
    own = {(part["steps"], part["name"]): part["state"] for part in parts}
    common = set.intersection(*map(set, ranks.gathered(list(own))))
    if not common:
        raise FileNotFoundError(
            f"{os.fspath(path)} has no checkpoint that all {ranks.size} ranks wrote; save on all "
            "of them, and start as many processes again"
        )
    return own[max(common)]


def _files(path: str | os.PathLike[str], rank: int) -> tuple[Path, Path]:
    """Return where a rank's part is, and where it is until all have written theirs."""
    own = f"{os.fspath(path)}.rank{rank}"
    return Path(own), Path(f"{own}.new")


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


def write_atomically(path: str | os.PathLike[str], state: Any, **options: Any) -> None:
    """Write ``state`` so that ``path`` holds the old or the new whole, whenever power is cut.

    options: as ``torch.save`` takes them. Several ranks may write one path: it is one of theirs.

    Raises OSError, which names the file, if the disk is full.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    with whole_file(path, writer=rank) as partial, partial.open("wb") as file:
        try:
            torch.save(state, file, **options)
        except RuntimeError as error:
            # torch's writer hides why a file cannot be written behind a check of its own.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    # The new name is on the disk only when the folder is.
    folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY)
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
