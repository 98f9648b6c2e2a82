"""What a training leaves on the disk: checkpoint, model, metrics, report."""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkernels.run.report import RunReport
from dpkernels.train.options import Options

CHECKPOINT = "checkpoint.pt"
MODEL = "model.pt"
METRICS = "metrics.csv"
REPORT = "report.json"
REPORT_TEXT = "report.txt"


@dataclass(frozen=True)
class Epoch:
    """One row of ``metrics.csv``.

    loss: mean over the epoch, of what was trained since a restart; depends on the private data.
    accuracy: share of the test part. epsilon: spent so far, None if there is no guarantee.
    samples_per_second: of all training so far, evaluation left out.
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


@dataclass(frozen=True)
class Outcome:
    """A finished training.

    note: what is to be known of the data. preconditioner: its own report, None without one.
    """

    options: Options
    note: str
    epochs: tuple[Epoch, ...]
    report: RunReport
    preconditioner: str | None

    @property
    def accuracy(self) -> float:
        """On the test part, after the last epoch."""
        return self.epochs[-1].accuracy

    @property
    def samples_per_second(self) -> float:
        """Of the whole training, evaluation left out."""
        return self.epochs[-1].samples_per_second

    def summary(self) -> str:
        """Return two lines for people."""
        options, epsilon = self.options, self.report.epsilon
        spent = "no epsilon: not private" if epsilon is None else f"epsilon {epsilon:.4f}"
        return (
            f"{options.method} on {options.dataset}, {options.model}: accuracy "
            f"{self.accuracy:.2%}, {spent} at delta {options.delta:g}\n"
            f"noise multiplier {self.report.noise_multiplier:.4f}, {self.report.steps} steps, "
            f"{self.samples_per_second:,.0f} samples/s"
        )

    def write(self, output: Path) -> None:
        """Write ``metrics.csv``, ``report.json`` and ``report.txt``."""
        with (output / METRICS).open("w", newline="") as file:
            names = [field.name for field in dataclasses.fields(Epoch)]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(epoch.to_dict() for epoch in self.epochs)
        content = {
            "options": dataclasses.asdict(self.options),
            "data": self.note,
            "accuracy": self.accuracy,
            "samples_per_second": self.samples_per_second,
            "privacy": self.report.to_dict(),
            "preconditioner": self.preconditioner,
        }
        (output / REPORT).write_text(json.dumps(content, indent=2) + "\n")
        parts = [
            self.summary(),
            f"data: {self.note}",
            "losses in metrics.csv depend on the data: not covered by epsilon; the test part is "
            "taken for public",
            str(self.report),
            self.preconditioner or "",
        ]
        (output / REPORT_TEXT).write_text("\n\n".join(filter(None, parts)) + "\n")
