"""``dpkernels repro fedceo --attack``: attack, write the table and the picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro import provenance
from dpkernels.repro.federated.inversion import report
from dpkernels.repro.federated.inversion.study import TARGETS, Effort, conduct
from dpkernels.repro.federated.inversion.uploads import SIGMAS
from dpkernels.train.data import load
from dpkernels.whole_file import write_text

_STEM = "fedceo_inversion"
# By data set: FashionMNIST's other sigmas would say the same again, for two minutes each.
DATASETS: dict[str, Sequence[float]] = {"cifar10": SIGMAS, "fashion": SIGMAS[:1]}


def run(
    datasets: Sequence[str],
    effort: Effort,
    *,
    data_dir: str | None = None,
    output: Path = Path("benchmarks") / "results",
    targets: int = len(TARGETS),
    seed: int = 0,
) -> list[Path]:
    """Attack on each data set and write; return the files.

    Raises ValueError for data sets without images, MissingData without files.
    """
    require_matplotlib()  # now, and not after ten minutes
    where = provenance.collect()
    scenes = [
        conduct(
            load(name, data_dir),
            DATASETS.get(name, SIGMAS),
            effort,
            targets=targets,
            seed=seed,
            report=lambda text: print(text, flush=True),
        )
        for name in datasets
    ]
    output.mkdir(parents=True, exist_ok=True)
    files = [output / f"{_STEM}.{suffix}" for suffix in ("json", "md", "png")]
    content = report.to_dict(scenes, effort, where, _command(datasets, effort, targets, seed))
    write_text(files[0], json.dumps(content, indent=1) + "\n")
    write_text(files[1], report.markdown(scenes, effort, where))
    report.draw(scenes, files[2])
    return files


def _command(datasets: Sequence[str], effort: Effort, targets: int, seed: int) -> str:
    words = ["python -m dpkernels.repro.federated.inversion --datasets", *datasets]
    words += ["--iterations", str(effort.iterations), "--restarts", str(effort.restarts)]
    words += ["--images", str(targets), "--seed", str(seed)]
    return " ".join([*words, *(["--known-label"] if effort.known_label else [])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="dpkernels repro fedceo --attack", description=__doc__)
    add = parser.add_argument
    add("--datasets", nargs="+", choices=["cifar10", "fashion", "mnist", "digits"])
    add("--iterations", type=int, default=300, help="of L-BFGS (default 300)")
    add("--restarts", type=int, default=2, help="random starts; the least loss counts (default 2)")
    add("--known-label", action="store_true", help="take the label by iDLG's rule")
    add("--images", type=int, default=len(TARGETS), choices=range(1, len(TARGETS) + 1))
    add("--seed", type=int, default=0, help="of model, noise and starts")
    add("--data-dir", help="folder of the data sets (default $DPKERNELS_DATA)")
    add("--output", type=Path, default=Path("benchmarks") / "results", help="folder of the files")
    options = parser.parse_args(arguments)
    effort = Effort(options.iterations, options.restarts, options.known_label)
    for file in run(
        options.datasets or list(DATASETS),
        effort,
        data_dir=options.data_dir,
        output=options.output,
        targets=options.images,
        seed=options.seed,
    ):
        print(f"written: {file}")
    return 0
