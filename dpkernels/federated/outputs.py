"""What a federated run leaves on the disk: checkpoint, model, metrics, report, curve.

The model of a run with an epsilon may be published. The checkpoint holds what clients keep to
themselves. Accuracy on records that were held out, and how many users a Poisson sample had, depend
on the private data beyond what epsilon says.
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

from dpkernels import info
from dpkernels.federated.build import Built
from dpkernels.federated.options import Options
from dpkernels.run.checkpoint import write_atomically
from dpkernels.run.report import in_words
from dpkernels.whole_file import write_text

CHECKPOINT = "checkpoint.pt"
JOURNAL = "rounds.jsonl"
MODEL = "model.pt"
METRICS = "metrics.csv"
REPORT = "report.json"
REPORT_TEXT = "report.txt"
CURVE = "curve.png"


@dataclass(frozen=True)
class Evaluated:
    """One row of ``metrics.csv``: how things stand after a round.

    round: how many were released, those before training included. stage: what the last one was of.
    accuracy: share of the test part. epsilon: spent so far, None if there is no guarantee.
    clients, arrived: of this round. bytes_up, bytes_down: of all rounds so far, all clients.
    seconds: of all rounds so far, evaluation not included.
    """

    round: int
    stage: str
    accuracy: float
    epsilon: float | None
    clients: int
    arrived: int
    bytes_up: int
    bytes_down: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as checkpoints and tables have it."""
        return dataclasses.asdict(self)


def write_metrics(output: Path, options: Options, rows: Sequence[Evaluated]) -> None:
    """Write ``metrics.csv``; the names of columns say which are not private."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(Evaluated)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    private = ["accuracy"] if options.accuracy_is_private else []
    if options.participation_is_secret:
        private += ["clients", "arrived", "bytes_up", "bytes_down"]
    writer.writerow({name: name for name in names} | {n: f"{n}_not_private" for n in private})
    writer.writerows(row.to_dict() for row in rows)
    write_text(output / METRICS, text.getvalue())


def write_model(output: Path, built: Built) -> None:
    """Write ``model.pt``: the parameters, and what is done to features before them.

    theta: softmax regression takes ``theta @ [x - feature_mean, bias]``; ``feature_mean`` is there
    if features are centred, ``bias`` is 0 for none. A network has ``state_dict``, too; its images
    go through ``smoothing.response(H, W, smooth)`` first, unless ``smooth`` is 0.
    """
    server, options = built.federation.server, built.options
    content: dict[str, Any] = {
        "dataset": options.dataset,
        "model": options.model,
        "public": options.public,
        "smooth": options.smooth,
        "theta": built.federation.model(),
        "bias": options.bias,
    }
    if "feature_mean" in server:
        content["feature_mean"] = server["feature_mean"]
    if built.network is not None:
        content["state_dict"] = built.network.state_dict()
    write_atomically(output / MODEL, content)


@dataclass(frozen=True)
class Outcome:
    """A federated run as it stands, for its reports."""

    built: Built
    rows: tuple[Evaluated, ...]

    @property
    def accuracy(self) -> float:
        """On the test part, after the last round."""
        return self.rows[-1].accuracy

    @property
    def epsilon(self) -> float | None:
        """What all rounds cost together; None if there is no guarantee."""
        return self.built.federation.epsilon()

    @property
    def not_private(self) -> str | None:
        """Why there is no epsilon, if so."""
        federation = self.built.federation
        if federation.epsilon_target is None and federation.algorithm.private:
            return "no noise was added (--epsilon none)"
        return federation.void

    @property
    def claimed(self) -> float | None:
        """What would be claimed for a run that has no guarantee in spite of its noise."""
        return self.built.federation.claimed_epsilon() if self.built.federation.void else None

    def guarantee(self) -> str:
        """Return epsilon, for whom and against whom, or why there is none."""
        options = self.built.options
        if self.epsilon is None:
            claim = ""
            if self.claimed is not None:
                paper = "the paper's" in (self.not_private or "")
                whose = "the paper would claim" if paper else "its noise was made for"
                claim = f"; {whose} {self.claimed:.4g}"
            return f"epsilon: none{claim} ({self.not_private})"
        seen = "only sums" if options.view == "aggregate" else "each client's upload"
        return (
            f"epsilon {self.epsilon:.4f} at delta {options.delta:g}, for one {options.level}, "
            f"{options.adjacency}; the server sees {seen}"
        )

    def public(self) -> list[str]:
        """Return what is taken for public, and what is declared so."""
        options = self.built.options
        found = [f"{options.clients} clients", f"{self.built.data.classes} classes"]
        found.append(f"{options.records_per_client:g} records a client, which sums are divided by")
        if self.built.total_declared:
            found.append("so the number of all records, which that number was computed from")
        if options.validation is None:
            found.append("the test part")
        if options.public_inputs is not None:
            found.append(f"{options.public_inputs} inputs of it that the server has")
        if options.public is not None:
            found.append(f"DECLARED: {options.public} of the private training records")
        return found

    def not_covered(self) -> str:
        """Return what epsilon does not cover of all that is written, in a sentence."""
        options = self.built.options
        parts = [f"accuracy{options.measured}"] if options.accuracy_is_private else []
        if options.known.kind.personal:
            parts.append("personal models, which are for their clients alone")
        if options.participation_is_secret:
            parts.append("how many clients took part (bytes, faults, metrics.csv)")
        if options.public is not None:
            parts.append(f"--public {options.public}")
        parts += [f"{CHECKPOINT}, which holds clients' private state", "any choice of settings"]
        return f"not covered by epsilon: {', '.join(parts)}"

    def summary(self) -> str:
        """Return a few lines for people."""
        options, federation = self.built.options, self.built.federation
        return (
            f"{options.algorithm} on {options.dataset}, {options.model}, {options.clients} clients "
            f"({options.partition}): accuracy {self.accuracy:.2%}{options.measured}\n"
            f"{self.guarantee()}\n"
            f"{federation.rounds_released} rounds, {federation.bytes_up / 1e6:,.1f} MB up, "
            f"{federation.bytes_down / 1e6:,.1f} MB down, {federation.seconds:.1f} s\n"
            f"{self.not_covered()}; {self._of_the_model()}"
        )

    def _of_the_model(self) -> str:
        if self.epsilon is None:
            return f"{MODEL} is not private: do not publish it"
        return f"{MODEL} may be published"

    def _releases(self) -> list[dict[str, Any]]:
        history = self.built.federation.accountant.history
        return [{"statement": s.to_dict(), "releases": count} for s, count in history]

    def _stages(self) -> list[dict[str, Any]]:
        """Return what each stage releases, and its noise."""
        federation = self.built.federation
        found = []
        for stage in federation.stages:
            multiplier = federation.multipliers[stage.name]
            query = stage.query
            found.append(
                {
                    "stage": stage.name,
                    "rounds": stage.rounds,
                    "releases_a_round": stage.releases,
                    "share_of_the_budget": stage.share,
                    "elements": list(query.shape),
                    "sensitivity": query.moved(federation.terms.adjacency)
                    if federation.algorithm.private
                    else None,
                    "noise_multiplier": multiplier,
                    "noise_of_a_client": federation.release.client_std(stage, multiplier),
                    "noise_on_the_sum": federation.release.sum_std(stage, multiplier),
                    "noise_added_by": "the aggregator" if federation.release.central else "clients",
                }
            )
        return found

    def _seed(self) -> str:
        seed = self.built.options.seed
        return "operating system" if seed is None else f"fixed seed {seed}: protects nobody"

    def to_dict(self) -> dict[str, Any]:
        """Return the report in types that JSON knows."""
        federation, options = self.built.federation, self.built.options
        return {
            "options": dataclasses.asdict(options),
            "data": self.built.data.note,
            "accuracy": self.accuracy,
            "taken_for_public": self.public(),
            "not_covered": self.not_covered(),
            "privacy": {
                "epsilon": self.epsilon,
                "delta": options.delta,
                "not_private": self.not_private,
                "claimed_epsilon": self.claimed,
                "accountant": federation.accountant.name,
                "releases": self._releases(),
                "stages": self._stages(),
                "noise": self._seed(),
            },
            "algorithm": repr(federation.algorithm),
            "rounds_released": federation.rounds_released,
            "rounds_begun": federation.rounds_begun,
            "faults": dict(federation.faults),
            "bytes_up": federation.bytes_up,
            "bytes_down": federation.bytes_down,
            "training_seconds": federation.seconds,
            "versions": info.versions(),
        }

    def _text(self) -> str:
        federation = self.built.federation
        lines = [f"{n} x {in_words(s)}" for s, n in federation.accountant.history]
        lines += [
            f"{x['stage']}: {x['share_of_the_budget']:.0%} of the budget, sensitivity "
            f"{_or_unbounded(x['sensitivity'])}, noise {x['noise_on_the_sum']:.4g} on what is "
            f"seen, {x['noise_of_a_client']:.4g} by each client"
            for x in self._stages()
        ]
        faults = ", ".join(f"{n} {name}" for name, n in federation.faults.items()) or "none"
        versions = ", ".join(f"{name} {v}" for name, v in info.versions().items() if v)
        parts = [
            self.summary(),
            f"data: {self.built.data.note}",
            f"taken for public: {'; '.join(self.public())}",
            "\n".join([*lines, f"noise from {self._seed()}"]),
            f"{federation.algorithm}",
            f"{federation.rounds_begun} rounds begun; uploads that did not count: {faults}",
            versions,
        ]
        return "\n\n".join(parts) + "\n"

    def write(self, output: Path) -> None:
        """Write ``metrics.csv``, ``report.txt`` and, last, ``report.json``: then all is there."""
        write_metrics(output, self.built.options, self.rows)
        write_text(output / REPORT_TEXT, self._text())
        write_text(output / REPORT, json.dumps(self.to_dict(), indent=2) + "\n")


def _or_unbounded(sensitivity: float | None) -> str:
    return "not bounded" if sensitivity is None else f"{sensitivity:.4g}"
