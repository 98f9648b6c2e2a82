"""What Fisher information costs over local training: ``python -m benchmarks.fisher_overhead``.

One client of FedFisher trains for 30 epochs of SGD in batches of 64, in the library's compiled
form, and then estimates F of its model on all its records. Measured in turn are some epochs, which
take the same time each, and every kind and expectation of F; shown is F's time over that of 30
epochs. ``exact`` is a pass for each class but one, and is there to compare with.

Writes ``fisher_overhead.json`` and ``fisher_overhead.md`` to ``benchmarks/results``; ``--quick``
measures one round on one batch, and writes only where ``--output`` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from benchmarks import provenance
from benchmarks.report import markdown_table
from benchmarks.timing import Budget, Spread, measure
from dpkernels import backend
from dpkernels.federated import LocalSGD, ModelProblem
from dpkernels.fisher import fisher_information
from dpkernels.fisher.errors import Expectation
from dpkernels.fisher.estimate import Kind

_RESULTS = Path(__file__).resolve().parent / "results"
_CPU = torch.device("cpu")
_EPOCHS, _BATCH, _RATE, _CLASSES = 30, 64, 0.01, 10
_TARGET = 0.05


@dataclass(frozen=True)
class Case:
    """A network of the paper, without biases, the records of one of 5 clients, and F's batches."""

    name: str
    shape: tuple[int, int, int]
    channels: tuple[int, int]
    widths: tuple[int, int, int]
    records: int
    batch: int

    def model(self) -> nn.Sequential:
        """Return it with parameters from a fixed seed."""
        torch.manual_seed(0)
        first, second = self.channels
        layers: list[nn.Module] = []
        for inputs, outputs in ((self.shape[0], first), (first, second)):
            layers += [nn.Conv2d(inputs, outputs, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
        layers.append(nn.Flatten())
        sizes = (*self.widths, _CLASSES)
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, bias=False), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


CASES = (
    Case("LeNet", (1, 28, 28), (6, 16), (256, 120, 84), 12_000, 512),
    Case("CNN", (3, 32, 32), (32, 64), (1600, 512, 128), 10_000, 256),
)


@dataclass(frozen=True)
class Found:
    """One kind and expectation: milliseconds of F, of an epoch, and F over 30 of them."""

    case: str
    records: int
    kind: str
    expectation: str
    fisher: Spread
    epoch: Spread
    share: Spread


def compare(case: Case, records: int, budget: Budget) -> list[Found]:
    """Time an epoch of local training and every form of F in turn."""
    model = case.model()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(records, *case.shape, generator=generator)
    y = torch.randint(_CLASSES, (records,), generator=generator)
    problem = ModelProblem(model, x, y, [torch.arange(records)], x[:1], y[:1])
    cohort, theta = problem.cohort(torch.arange(1)), problem.initial()
    local, seeds = LocalSGD(1, _BATCH, _RATE), torch.ones(1, dtype=torch.int64)
    names = [(kind, how) for kind in get_args(Kind) for how in get_args(Expectation)]

    def form(kind: Kind, how: Expectation) -> Callable[[], object]:
        return lambda: (
            fisher_information(model, x.split(case.batch), kind=kind, expectation=how).records
        )

    forms = [lambda: problem.local_updates(cohort, theta, local, seeds)]
    epochs, *times = measure([*forms, *(form(*name) for name in names)], budget, _CPU)
    return [
        Found(
            case.name,
            records,
            kind,
            how,
            Spread.of(own),
            Spread.of(epochs),
            Spread.of([a / (_EPOCHS * b) for a, b in zip(own, epochs, strict=True)]),
        )
        for (kind, how), own in zip(names, times, strict=True)
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each kind and expectation."""
    header = ["network, records", "F", "expectation", "F, ms", "an epoch, ms", "F over 30 epochs"]
    rows = []
    for one in found:
        share = one["share"]
        verdict = f"{share['median']:.1%} ({share['p25']:.1%}-{share['p75']:.1%})"
        if one["expectation"] != "exact":
            verdict += f", target {_TARGET:.0%}: "
            verdict += "met" if share["median"] < _TARGET else "MISSED"
        rows.append(
            [
                f"{one['case']}, {one['records']:,}",
                one["kind"],
                one["expectation"],
                f"{one['fisher']['median']:.4g}",
                f"{one['epoch']['median']:.4g}",
                verdict,
            ]
        )
    return markdown_table(header, rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    if backend.extension is None:
        sys.exit("benchmarks.fisher_overhead: dpkernels._C is not built; run make build")
    torch.set_num_threads(options.threads)
    command = "python -m benchmarks.fisher_overhead" + (" --quick" if options.quick else "")
    where = provenance.collect(_CPU) | {"command": command}
    budget = Budget(rounds=1) if options.quick else Budget(options.seconds)
    found = []
    for case in CASES:
        records = case.batch if options.quick else case.records
        found += [asdict(one) for one in compare(case, records, budget)]
        print(table(found[-6:]), file=sys.stderr, flush=True)
    output = options.output or (None if options.quick else _RESULTS)
    if output is None:
        return 0
    output.mkdir(parents=True, exist_ok=True)
    written = {"provenance": where | {"quick": options.quick}, "results": found}
    (output / "fisher_overhead.json").write_text(json.dumps(written, indent=1) + "\n")
    dirty = " with uncommitted changes" if where["dirty"] else ""
    title = (
        f"Fisher information over 30 local epochs of compiled SGD, batch 64. {where['cpu']}, "
        f"{where['threads']} threads, {where['instruction_set']['dpkernels']}; torch "
        f"{where['versions']['torch']}; commit {str(where['commit'])[:9]}{dirty}, "
        f"{where['time'][:10]}; `{where['command']}`"
    )
    (output / "fisher_overhead.md").write_text(f"{title}\n\n{table(found)}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fisher_overhead", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="one batch of records, one round")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long for each network")
    # A client is trained by one thread.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
