"""What a training leaves on the disk: checkpoint, model, metrics, report.

The model may be published. Losses, and the number of samples that were dropped because they were
not finite, depend on the private data beyond what epsilon says; the checkpoint holds both, too.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkernels.run.report import RunReport
from dpkernels.train.atomic import write_text
from dpkernels.train.options import Options

CHECKPOINT = "checkpoint.pt"
MODEL = "model.pt"
METRICS = "metrics.csv"
REPORT = "report.json"
REPORT_TEXT = "report.txt"
_NOT_COVERED = (
    f"not covered by epsilon: training losses ({METRICS}), {CHECKPOINT}, and the number of dropped "
    "samples in the reports; keep them to yourself"
)


@dataclass(frozen=True)
class Epoch:
    """One row of ``metrics.csv``.

    loss: mean over the epoch, of what was trained since a restart; depends on the private data.
    accuracy: share of the test part. epsilon: spent so far, None if there is no guarantee.
    samples_per_second: of all training so far, estimates of curvature included, evaluation not.
    """

    epoch: int
    step: int
    loss: float | None
    accuracy: float
    epsilon: float | None
    samples_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as checkpoints and tables have it."""
        return dataclasses.asdict(self)


def write_metrics(output: Path, epochs: Sequence[Epoch]) -> None:
    """Write ``metrics.csv``; the name of the losses' column says that they are not private."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(Epoch)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writerow({name: name for name in names} | {"loss": "loss_not_private"})
    writer.writerows(epoch.to_dict() for epoch in epochs)
    write_text(output / METRICS, text.getvalue())


@dataclass(frozen=True)
class Outcome:
    """A finished training.

    note: what is to be known of the data. preconditioner: its own report, None without one.
    seconds: of training, all estimates of curvature included, evaluation not, over all restarts.
    """

    options: Options
    note: str
    epochs: tuple[Epoch, ...]
    seconds: float
    report: RunReport
    preconditioner: str | None

    @property
    def accuracy(self) -> float:
        """On the test part, after the last epoch."""
        return self.epochs[-1].accuracy

    @property
    def samples_per_second(self) -> float:
        """Of the whole training, estimates of curvature included, evaluation not."""
        return self.epochs[-1].samples_per_second

    def summary(self) -> str:
        """Return three lines for people."""
        options, epsilon = self.options, self.report.epsilon
        on = "" if options.validation is None else " on held-out records, which is not covered"
        spent = "no epsilon: not private"
        if epsilon is not None:
            spent = f"epsilon {epsilon:.4f} at delta {options.delta:g}"
        return (
            f"{options.method} on {options.dataset}, {options.model}: accuracy "
            f"{self.accuracy:.2%}{on}, {spent}\n"
            f"noise multiplier {self.report.noise_multiplier:.4f}, {self.report.steps} steps, "
            f"{self.seconds:.1f} s of training, {self.samples_per_second:,.0f} samples/s\n"
            f"{_NOT_COVERED}"
        )

    def _averaged(self) -> str:
        decay = self.options.average
        if decay is None:
            return ""
        return f"the model is a moving average of released parameters, decay {decay:g}"

    def write(self, output: Path) -> None:
        """Write ``metrics.csv``, ``report.txt`` and, last, ``report.json``: then all is there."""
        write_metrics(output, self.epochs)
        parts = [
            self.summary(),
            f"data: {self.note}",
            "the test part and the number of records are taken for public",
            self._averaged(),
            str(self.report),
            self.preconditioner or "",
        ]
        write_text(output / REPORT_TEXT, "\n\n".join(filter(None, parts)) + "\n")
        content = {
            "options": dataclasses.asdict(self.options),
            "data": self.note,
            "accuracy": self.accuracy,
            "samples_per_second": self.samples_per_second,
            "training_seconds": self.seconds,
            "privacy": self.report.to_dict(),
            "preconditioner": self.preconditioner,
        }
        write_text(output / REPORT, json.dumps(content, indent=2) + "\n")
