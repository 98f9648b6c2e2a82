"""``dpkernels train``: private training from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Train a model privately within a budget. Noise is calibrated for it, samples are drawn by Poisson
sampling, and every step is accounted for. The default, digits, needs no files; the other data sets
are read from --data-dir or $DPKERNELS_DATA. After Ctrl-C, --resume goes on. Epsilon covers the
models; it does not cover training losses, on the bar and in metrics.csv, nor the checkpoint, nor
the number of dropped samples in the reports, nor accuracy on records held out by --validation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to ``parser``; what is left out is the data set's default."""
    add = parser.add_argument_group("what is trained").add_argument
    add("--dataset", help="digits (default), mnist, fashion, cifar10, imdb, adult")
    add("--model", help="logistic, mlp, cnn, deep-cnn, vit, bert; by default the data set's")
    add("--features", type=int, help="imdb: places that words are hashed to (16384)")
    add("--method", help="dp-sgd (default), dp-kfc and others: --list names them")
    add = parser.add_argument_group("privacy").add_argument
    add("--epsilon", type=float, help="the budget (default 1)")
    add("--delta", type=float, help="less than 1 / number of records (default 1e-5)")
    add("--clip", type=float, help="norm that each sample's gradient is clipped to (default 1)")
    add("--accountant", help="pld (default) or rdp")
    add("--seed", type=int, help="fix noise, samples and parameters: for tests, protects nobody")
    add = parser.add_argument_group("steps").add_argument
    add("--epochs", type=int, help="passes over the data, on average")
    add("--batch-size", type=int, help="expected size of a batch")
    add("--physical-batch-size", type=int, help="samples that are in memory at a time (512)")
    add("--optimizer", help="adam, adamw, sgd (momentum 0.9), adambc, sofim")
    add("--lr", type=float, help="learning rate, of the first step")
    add("--schedule", help="constant (default), linear or cosine: of the learning rate, to 0")
    add("--validation", type=int, help="leave so many records out, and measure accuracy on them")
    add("--average", type=float, help="decay of an average of parameters that is the model (none)")
    add = parser.add_argument_group("curvature", "methods with a preconditioner").add_argument
    add("--refresh-every", type=int, help="steps between estimates of curvature (50)")
    add("--damping", type=float, help="added to the factors (0.1; AdaDPS 0.01)")
    add("--normalise", help="what damping is measured by: factors (default), damping, none")
    add("--sides", help="which factors: A (default), G or AG")
    add("--rank", type=int, help="eigenpairs that are kept of each factor (all)")
    add("--probe-batches", type=int, help="batches of 256 probes in an estimate (8)")
    add("--power", type=float, help="spectrum f^-POWER of noise for images (3)")
    add = parser.add_argument_group("after the noise").add_argument
    add("--filter", help="disk: a Kalman filter before the optimizer (the method's, or none)")
    add("--floor", type=float, help="adambc: least second moment (by the noise)")
    add("--kappa", type=float, help="disk: weight of a new gradient, up to 1 (0.7)")
    add = parser.add_argument_group("files").add_argument
    add("--data-dir", help="folder of the data sets")
    add("--output", type=Path, help="folder for report, metrics, checkpoint (runs/DATASET-METHOD)")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--quiet", action="store_true", help="no progress bar")
    add("--list", action="store_true", help="list data sets, models and methods, and stop")


def run(options: argparse.Namespace) -> int:
    """Train; return the exit status: 0, 2 for what cannot be done, 130 after Ctrl-C."""
    from dpkernels.train.ending import exit_status, folder_of
    from dpkernels.train.outputs import CHECKPOINT

    if options.list:
        print(_listing())
        return 0
    name = f"{options.dataset or 'digits'}-{options.method or 'dp-sgd'}"
    return exit_status(
        "train",
        CHECKPOINT,
        lambda: folder_of(options.output, options.resume, name),
        lambda output: _train(options, output),
    )


def _train(options: argparse.Namespace, output: Path) -> str:
    """Train and return what is printed at the end."""
    from dataclasses import fields

    from dpkernels.train.alone import made_folder
    from dpkernels.train.ending import check_new
    from dpkernels.train.loop import train
    from dpkernels.train.options import Options, filled_in, resumed
    from dpkernels.train.outputs import CHECKPOINT

    given = {field.name: getattr(options, field.name) for field in fields(Options)}
    chosen = resumed(output, given) if options.resume else filled_in(given)
    with made_folder(output):
        if not options.resume:
            check_new(output, CHECKPOINT)
        outcome = train(chosen, output, resume=options.resume, progress=not options.quiet)
    return f"{outcome.summary()}\nwritten to {output}"


def _listing() -> str:
    from dpkernels.train.data import DATASETS
    from dpkernels.train.methods import METHODS
    from dpkernels.train.models import MODELS

    width = max(map(len, METHODS))
    return "\n".join(
        [
            f"data sets: {', '.join(DATASETS)}",
            f"models: {', '.join(MODELS)}",
            "methods:",
            *(f"  {name.ljust(width)}  {method.about}" for name, method in METHODS.items()),
        ]
    )
