"""What a training leaves on the disk: checkpoint, model, metrics, report.

The model may be published. Losses, the number of samples that were dropped because they were not
finite, and accuracy on records that were held out depend on the private data beyond what epsilon
says; the checkpoint holds them, too.
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
from dpkernels.train.options import Options
from dpkernels.whole_file import write_text

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


def not_covered(options: Options) -> str:
    """Return what epsilon does not cover of all that is written, in a sentence."""
    held_out = "" if options.validation is None else "accuracy on held-out records, "
    return (
        f"not covered by epsilon: {held_out}training losses ({METRICS}), {CHECKPOINT}, and the "
        "number of dropped samples in the reports; keep them to yourself"
    )


def write_metrics(output: Path, options: Options, epochs: Sequence[Epoch]) -> None:
    """Write ``metrics.csv``; the names of columns say which are not private."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(Epoch)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    private = ["loss"] if options.validation is None else ["loss", "accuracy"]
    writer.writerow({name: name for name in names} | {n: f"{n}_not_private" for n in private})
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
        on = "" if options.validation is None else " on held-out records"
        spent = "no epsilon: not private"
        if epsilon is not None:
            spent = f"epsilon {epsilon:.4f} at delta {options.delta:g}"
        return (
            f"{options.method} on {options.dataset}, {options.model}: accuracy "
            f"{self.accuracy:.2%}{on}, {spent}\n"
            f"noise multiplier {self.report.noise_multiplier:.4f}, {self.report.steps} steps, "
            f"{self.seconds:.1f} s of training, {self.samples_per_second:,.0f} samples/s\n"
            f"{not_covered(options)}"
        )

    def _averaged(self) -> str:
        decay = self.options.average
        if decay is None:
            return ""
        return f"the model is a moving average of released parameters, decay {decay:g}"

    def write(self, output: Path) -> None:
        """Write ``metrics.csv``, ``report.txt`` and, last, ``report.json``: then all is there."""
        write_metrics(output, self.options, self.epochs)
        tested = "" if self.options.validation is not None else "the test part and "
        parts = [
            self.summary(),
            f"data: {self.note}",
            f"taken for public: {tested}the number of records",
            self._averaged(),
            str(self.report),
            self.preconditioner or "",
        ]
        write_text(output / REPORT_TEXT, "\n\n".join(filter(None, parts)) + "\n")
        content = {
            "options": dataclasses.asdict(self.options),
            "data": self.note,
            "accuracy": self.accuracy,
            "not_covered": not_covered(self.options),
            "samples_per_second": self.samples_per_second,
            "training_seconds": self.seconds,
            "privacy": self.report.to_dict(),
            "preconditioner": self.preconditioner,
        }
        write_text(output / REPORT, json.dumps(content, indent=2) + "\n")
