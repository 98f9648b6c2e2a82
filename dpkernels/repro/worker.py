"""One training in a process of its own: ``python -m dpkernels.repro.worker TASK``.

It stops, with a checkpoint, when its standard input ends: when ``jobs`` closes it, or is gone.
"""

from __future__ import annotations

import _thread
import dataclasses
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

from dpkernels.repro.trials import Task, perform
from dpkernels.train.formats import MissingData
from dpkernels.train.options import Options

STOPPED = 130
MISSING = 3


def encoded(task: Task, *, jobs: int, threads: int) -> str:
    """Return what the process gets as its argument."""
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    fields |= {"options": dataclasses.asdict(task.options), "folder": str(task.folder)}
    return json.dumps({"task": fields, "jobs": jobs, "threads": threads})


def main(argument: str) -> int:
    """Train; return the exit status: 0, 1, ``MISSING`` without its data, ``STOPPED``.

    The last line on standard error says why it is not 0.
    """
    asked = json.loads(argument)
    fields = asked["task"]
    fields |= {"options": Options(**fields["options"]), "folder": Path(fields["folder"])}
    torch.set_num_threads(asked["threads"])
    # In the background of a script interrupts are ignored, and this one would train to its end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()
        perform(Task(**fields), jobs=asked["jobs"])
    except KeyboardInterrupt:
        return STOPPED
    except MissingData as error:
        print(error, file=sys.stderr)
        return MISSING
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _interrupt_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    _thread.interrupt_main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
