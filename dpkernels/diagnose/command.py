"""``dpkernels diagnose``: the paper's diagnostics of a model, as JSON and figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# As functions and figures are named; ``dpkernels.diagnose.measures`` has one for each.
WHAT = ("spectra", "alignment", "snr", "clipping", "hessian")
DESCRIPTION = """\
Train a model for a few steps, or take that of a finished dpkernels train, and look at it: spectra
of the Kronecker factors by source, their alignment with the private data's over training, signal
to noise of every layer, clipped samples, the Hessian's density. All of that looks at private
records without noise: it is not private, and must not be published. On the default, digits, it
takes less than a minute."""
# Figures by layer want layers, and the default on digits has one.
_MODELS = {"digits": "cnn"}
# Of ``dpkernels.train.options.Options``.
_CHOSEN = (
    "dataset",
    "model",
    "method",
    "epsilon",
    "delta",
    "epochs",
    "batch_size",
    "lr",
    "optimizer",
    "clip",
    "seed",
    "data_dir",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to ``parser``; what is left out is the data set's default."""
    add = parser.add_argument
    add("--dataset", help="digits (default), mnist, fashion, cifar10, imdb, adult")
    add(
        "--model",
        help="logistic, mlp, cnn, deep-cnn, vit, bert; by default the data set's, cnn for digits",
    )
    add("--checkpoint", type=Path, help="folder of a finished dpkernels train, instead of training")
    add("--what", nargs="+", choices=WHAT, default=list(WHAT), help="which of them (default all)")
    add("--output", type=Path, required=True, help="folder for diagnostics.json and the figures")
    add("--steps", type=int, default=30, help="of training, without --checkpoint (default 30)")
    add("--method", help="that trains: dp-sgd (default), dp-kfc, ...: dpkernels train --list")
    add("--epsilon", type=float, help="budget of the whole training, which makes the noise (1)")
    add("--delta", type=float, help="of the budget (default 1e-5)")
    add("--epochs", type=int, help="of the whole training")
    add("--batch-size", type=int, help="expected size of a batch")
    add("--lr", type=float, help="learning rate")
    add("--optimizer", help="adam, adamw, sgd (momentum 0.9), adambc")
    add("--clip", type=float, help="norm that each sample's gradient is clipped to (default 1)")
    add("--seed", type=int, help="of parameters, samples, noise and probes")
    add("--data-dir", help="folder of the data sets (default $DPKERNELS_DATA)")


def run(options: argparse.Namespace) -> int:
    """Measure and write; return the exit status: 0, 2 for what cannot be done, 130 after Ctrl-C."""
    try:
        _diagnose(options)
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dpkernels diagnose: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndpkernels diagnose: stopped", file=sys.stderr)
        return 130
    return 0


def _diagnose(options: argparse.Namespace) -> None:
    from dpkernels.diagnose.measures import measure, write
    from dpkernels.diagnose.subject import load_subject, new_subject
    from dpkernels.train.options import filled_in
    from dpkernels.whole_file import check_folder

    check_folder(options.output, "output")
    if options.steps < 0:
        raise ValueError(f"steps must be an integer >= 0, got {options.steps}")
    given = {name: getattr(options, name) for name in _CHOSEN}
    print("NOT PRIVATE: this looks at private records without noise; do not publish what it writes")
    if options.checkpoint is None:
        given["model"] = given["model"] or _MODELS.get(given["dataset"] or "digits")
        subject, steps = new_subject(filled_in(given)), options.steps
    else:
        subject, steps = load_subject(options.checkpoint, given), 0
    for note in subject.notes:
        print(note)
    found = measure(subject, options.what, steps)
    for file in write(found, subject, options.output):
        print(f"written: {file} (not private)")
