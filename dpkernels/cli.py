"""The command line: ``dpkernels <command>``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from dpkernels.diagnose import command as diagnose_command
from dpkernels.federated import command as federate_command
from dpkernels.privacy import calibrate_command
from dpkernels.repro import command as repro_command
from dpkernels.train import command as train_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (or the process's own) name; return the exit status.

    As other tools do, it ends with 128 + SIGPIPE, and in silence, where whoever reads its output
    has left (``| head``), and with 2 where the output cannot be written.
    """
    try:
        try:
            options = _parser().parse_args(arguments)
            status: int = options.run(options)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ndpkernels: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"dpkernels: the output cannot be written: {error}", file=sys.stderr)
        _drop_output()
        return 2
    return status


def _drop_output() -> None:
    """Send what is still to be flushed at the end nowhere, so that it does not fail again."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpkernels",
        description="Compiled kernels for differentially private training.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    info = commands.add_parser(
        "info",
        help="versions, build configuration, and which backend serves which operation",
        description="Print versions, the build configuration, and for every operation and backend "
        "whether it can serve CPU and CUDA tensors, with the reason where it cannot.",
    )
    info.add_argument("--json", action="store_true", help="print JSON, for programs")
    info.set_defaults(run=_info)
    calibrate = commands.add_parser(
        "calibrate",
        help="noise, epsilon or steps for a privacy budget",
        description=calibrate_command.DESCRIPTION,
    )
    calibrate_command.add_arguments(calibrate)
    calibrate.set_defaults(run=_calibrate)
    train = commands.add_parser(
        "train",
        help="train a model privately within a budget",
        description=train_command.DESCRIPTION,
    )
    train_command.add_arguments(train)
    train.set_defaults(run=train_command.run)
    federate = commands.add_parser(
        "federate",
        help="train on the records of many clients, privately, within a budget",
        description=federate_command.DESCRIPTION,
    )
    federate_command.add_arguments(federate)
    federate.set_defaults(run=federate_command.run)
    repro = commands.add_parser(
        "repro",
        help="train the tables of a paper again, and compare",
        description=repro_command.DESCRIPTION,
    )
    repro_command.add_arguments(repro)
    repro.set_defaults(run=repro_command.run)
    diagnose = commands.add_parser(
        "diagnose",
        help="spectra, alignment, signal to noise, clipping, Hessian of a model: not private",
        description=diagnose_command.DESCRIPTION,
    )
    diagnose_command.add_arguments(diagnose)
    diagnose.set_defaults(run=diagnose_command.run)
    return parser


def _info(options: argparse.Namespace) -> int:
    import json

    from dpkernels import info

    report = info.collect()
    print(json.dumps(report, indent=2) if options.json else info.render(report))
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    try:
        found = calibrate_command.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dpkernels calibrate: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0
