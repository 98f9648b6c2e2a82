"""One script with Opacus and with the drop-in: ``python -m benchmarks.moving``.

The script is what Opacus' users write: a loader, ``PrivacyEngine.make_private``, and a loop. Only
the package differs that ``PrivacyEngine`` comes from. An epoch is timed whole, with its sampling,
loading and accounting. Writes ``moving.json`` and the table of the README.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import provenance
from benchmarks.memory import peak_extra_memory
from benchmarks.report import markdown_table, rewrite_section
from benchmarks.timing import Spread, interleave
from benchmarks.training.models import WORKLOADS, Workload

_ROOT = Path(__file__).resolve().parent.parent
_RESULT = _ROOT / "benchmarks" / "results" / "moving.json"
_CPU = torch.device("cpu")
_BATCHES = 8  # of an epoch
_MODELS = ("MLP", "CNN", "transformer")

# Package and grad_sample_mode; None trains without privacy.
FORMS: dict[str, tuple[str, str] | None] = {
    "not private": None,
    "opacus, hooks": ("opacus", "hooks"),
    "opacus, ghost": ("opacus", "ghost"),
    "dpkernels.opacus": ("dpkernels.opacus", "hooks"),
}


@dataclass
class Measured:
    """An epoch of one form: milliseconds a batch, and the peak of all tensors in it, in bytes."""

    model: str
    form: str
    milliseconds: Spread
    peak_bytes: int


def script(workload: Workload, package: str | None, mode: str) -> Callable[[], None]:
    """Return an epoch of training, private by ``package``."""
    torch.manual_seed(0)
    model, optimizer, loader = _ordinary(workload)
    criterion: nn.Module = nn.CrossEntropyLoss()
    if package is not None:
        engine = importlib.import_module(package).PrivacyEngine(accountant="rdp")
        made = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
        model, optimizer, *given, loader = made
        criterion = given[0] if given else criterion

    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        optimizer.zero_grad()
        if package is not None:
            engine.get_epsilon(1e-5)

    return epoch


def _ordinary(
    workload: Workload,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]]]:
    """Return model, optimizer and loader of an ordinary script."""
    model = workload.model()
    batches = [workload.batch() for _ in range(_BATCHES)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=len(batches[0][0]), shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.05), loader


def measure(workload: Workload, rounds: int) -> list[Measured]:
    """Run all forms in turn."""
    epochs = {}
    for name, form in FORMS.items():
        epochs[name] = script(workload, *(form or (None, "")))
        epochs[name]()
    times = interleave(list(epochs.values()), rounds, _CPU)
    weights = sum(p.nbytes for p in workload.model().parameters())
    found = []
    for (name, epoch), milliseconds in zip(epochs.items(), times, strict=True):
        gc.collect()
        peak = weights + peak_extra_memory(epoch, _CPU).allocated
        spread = Spread.of([ms / _BATCHES for ms in milliseconds])
        found.append(Measured(workload.name, name, spread, peak))
    return found


def table(found: list[Measured]) -> str:
    """Return a row for each model: time of a batch and peak memory, and multiples of plain."""
    rows = []
    for model in dict.fromkeys(one.model for one in found):
        own = {one.form: one for one in found if one.model == model}
        plain = own["not private"]
        cells = []
        for one in own.values():
            ms, megabytes = one.milliseconds.median, one.peak_bytes / 1e6
            ratio = ms / plain.milliseconds.median
            cells.append(f"{ms:.1f} ms ({ratio:.2f}x), {megabytes:.0f} MB")
        rows.append([model, *cells])
    return markdown_table(["model", *FORMS], rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="epochs of each form")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    options = parser.parse_args(arguments)
    where = provenance.collect(_CPU)
    found = []
    for workload in WORKLOADS:
        if workload.name.startswith(_MODELS) and options.only in workload.name:
            print(workload.name, file=sys.stderr, flush=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found += measure(workload, options.rounds)
    print(table(found))
    if not options.only:
        results = [asdict(one) for one in found]
        _RESULT.write_text(json.dumps({"where": where, "results": results}, indent=1) + "\n")
        title = f"{where['cpu']}, {where['threads']} threads, commit {str(where['commit'])[:7]}"
        rewrite_section(_ROOT / "README.md", "moving", f"{title}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
