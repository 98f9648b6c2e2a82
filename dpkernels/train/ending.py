"""How a command that trains ends: what it prints, and its exit status."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_status(
    command: str, checkpoint: str, folder: Callable[[], Path], work: Callable[[Path], str]
) -> int:
    """Do ``work`` in a folder and print what it returns; errors are one line on stderr.

    command: its name, ``train`` say. checkpoint: the name of the file that ``--resume`` needs.
    folder: which one it is; it may raise ValueError.

    Returns 0, 2 for what cannot be done, 130 after Ctrl-C.
    """
    output: Path | None = None
    try:
        output = folder()
        print(work(output))
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dpkernels {command}: {error}", file=sys.stderr)
        if getattr(error, "errno", None) in _FULL and output is not None:
            begun = (output / checkpoint).exists()
            next_step = _resume(command, output) if begun else "begin again"
            print(f"make room, then {next_step}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        message = "stopped before the first step"
        if output is not None and (output / checkpoint).exists():
            message = f"stopped; {_resume(command, output)}"
        print(f"\ndpkernels {command}: {message}", file=sys.stderr)
        return 130
    return 0


def folder_of(output: Path | None, resume: bool, name: str) -> Path:
    """Return the folder of a run: ``output``, or ``runs/name``.

    Raises ValueError where a run is to be resumed and nobody says which.
    """
    if output is not None:
        return output
    if resume:
        raise ValueError("output: --resume needs the --output of the run to go on with")
    return Path("runs") / name


def check_new(output: Path, checkpoint: str) -> None:
    """Raise ValueError if ``output`` holds a run already."""
    if (output / checkpoint).exists():
        raise ValueError(
            f"output: {output} holds a run already; go on with it by --resume, or name another "
            "--output"
        )


def _resume(command: str, output: Path) -> str:
    return f"go on with: dpkernels {command} --resume --output {output}"
