"""``dpkernels federate``: private federated learning from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Train one model on the records of many simulated clients, privately, within a budget. Noise is
calibrated for all rounds, and epsilon is computed from what the server sees. The default, digits,
needs no files; the other data sets are read from --data-dir or $DPKERNELS_DATA. After Ctrl-C, or a
crash, --resume goes on with the same epsilon. The model may be published; the checkpoint holds
clients' private state. Epsilon does not cover statistics that --public declares public, accuracy on
records held out by --validation, or the choice of settings. The papers' steps that have no
guarantee (--rescale xi; --dual uploaded, --control uploaded, --restart own or slot, and several
--local-steps at record level, under --view aggregate) run only where they are named, and report no
epsilon. So does the published fedfisher, --training sgd --epsilon none, which has no noise at all.
Models of ppsgd and centaur are for their clients alone; what is written is common."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to ``parser``; what is left out has its default."""
    add = parser.add_argument_group("what is trained").add_argument
    add("--algorithm", help="ours (default), fedgd, fedsofim, fednew, ...: --list names them")
    add("--dataset", help="digits (default), mnist, adult, synthetic, ...: --list names them")
    add("--model", help="logistic, or a network: mlp, cnn, lenet, ...; --list names them")
    add("--clients", type=int, help="how many there are (digits, synthetic 100; others 500)")
    add("--partition", help="iid (default), dirichlet:0.1, classes:2, shards:2, natural")
    add("--partition-seed", type=int, help="of the partition; whose records are whose (0)")
    add("--rounds", type=int, help="of training (70; fedfisher 1)")
    add = parser.add_argument_group("privacy").add_argument
    add("--epsilon", type=_epsilon, help="the budget (default 1), or none for no noise")
    add("--delta", type=float, help="less than 1 / number of units (1e-5 or less)")
    add("--level", help="whom epsilon protects: record, or user: a whole client; by algorithm")
    add("--view", help="what the server sees: aggregate, or each_upload; by algorithm")
    add("--adjacency", help="add-remove or replace-one; by default what level and view allow")
    add("--accountant", help="pld (default), gaussian or rdp")
    add("--sampling", help="clients of a round: all (default), poisson:0.1, fixed:10, shuffled:10")
    add("--record-rate", type=float, help="the chance of a record to be in a round (1)")
    add("--records-per-client", type=float, help="public number that sums are divided by (N / n)")
    add("--max-dropouts", type=int, help="clients of a round that may fail under aggregate (0)")
    add("--lose", type=float, help="simulate: each upload is lost with this probability (0)")
    add("--seed", type=int, help="fix noise, draws and parameters: for tests, protects nobody")
    add = parser.add_argument_group("features").add_argument
    add("--centre", action="store_true", default=None, help="centre them by a released mean")
    add("--centre-share", type=float, help="of the budget, for the mean (0.05)")
    add("--centre-clip", type=float, help="norm that features are clipped to for it (digits 8; 10)")
    add("--bias", type=float, help="a constant feature (1 if centred, else none)")
    add("--public", help="declare public, not covered: centre, standardise, pca:100")
    add("--smooth", type=float, help="exponent of a public filter on images (0.5, say; none)")
    add = parser.add_argument_group("settings", "of the algorithm; --list says whose").add_argument
    add("--lr", type=float, help="learning rate of the server (udp-fedavg: by --noise-length)")
    add("--clip", type=float, help="norm of a record's gradient, or of a user's upload")
    add("--momentum", type=float, help="heavy ball, in [0, 1)")
    add("--average", type=float, help="share of the last rounds whose iterates are averaged")
    add("--rho", type=float, help="damping of fedsofim, penalty of fednew")
    add("--beta", type=float, help="decay of fedsofim's momentum")
    add("--window", type=int, help="gradients in fedsofim's Fisher matrix, instead of momentum")
    add("--alpha", type=float, help="damping of fednew")
    add("--hessian", help="exact, cg, covariance or none")
    add("--hessian-clip", type=float, help="norm of a record's Hessian")
    add("--total-clip", type=float, help="norm of fednew's right-hand side, record level")
    add("--dual", help="none, clean, or uploaded: what fednew's dual is made of")
    add("--radius", type=float, help="of fednew's solve, for --dual clean at record level")
    add("--rescale", help="project, or xi: the paper's, without a guarantee")
    add("--tolerance", type=float, help="of conjugate gradients")
    add("--feature-clip", type=float, help="norm of fedfc's features")
    add("--gamma", type=float, help="damping of fedfc")
    add("--covariance-share", type=float, help="of the budget, for fedfc's covariance")
    add("--local-lr", type=float, help="learning rate inside a client")
    add("--local-momentum", type=float, help="heavy ball inside a client, in [0, 1); user level")
    add("--local-steps", type=int, help="of scaffold, local-dpsgd, centaur; fedceo, record level")
    add("--local-epochs", type=int, help="over a client's records in a round, user level")
    add("--local-batch", type=int, help="records in a batch of these")
    add("--control", help="none, clean, or uploaded: what scaffold's variates are made of")
    add("--decay", type=float, help="factor of udp-fedavg's rate from round to round")
    add("--noise-length", type=float, help="of all rounds, in lengths of the first model (3.5)")
    add(
        "--shrink",
        help="none, energy, scalar, layer, spectral: take noise out of udp-fedavg",
    )
    add("--shrunk", help="sum, update or filtered: what it is taken out of")
    add("--restart", help="mean; own or slot: which slice of fedceo a client starts from")
    add("--lam", type=float, help="of fedceo: threshold theta^(t/interval) / (2 lam); inf for 0")
    add("--theta", type=float, help="growth of fedceo's threshold")
    add("--interval", type=int, help="rounds between two folds of fedceo")
    add("--fold-last", type=int, help="fold the last so many modules only")
    add("--personal-lr", type=float, help="learning rate of the part that clients keep")
    add("--head-steps", type=int, help="of centaur's head in a round")
    add("--fisher", help="of fedfisher: kronecker or diagonal")
    add("--training", help="dp-sgd, dp-kfc, or sgd: fedfisher's as published, without a guarantee")
    add("--factors", help="records, public, probes or none: what fedfisher's curvature is from")
    add("--weights", help="records or equal: what fedfisher weights clients by")
    add("--iterations", type=int, help="of fedfisher's merge")
    add("--damping", type=float, help="of fedfisher's merge, in mean eigenvalues (0)")
    add("--factor-steps", type=int, help="releases of fedfisher's factors in a round")
    add("--factor-share", type=float, help="of the budget, for fedfisher's factors and counts")
    add("--factor-clip", type=float, help="of fedfisher's factors, in mean sizes over probes")
    add = parser.add_argument_group("files").add_argument
    add("--validation", type=int, help="leave so many records out, and measure accuracy on them")
    add("--public-inputs", type=int, help="inputs of the test part for --factors public")
    add("--evaluate-every", type=int, help="rounds between two measurements (rounds / 14)")
    add("--checkpoint-every", type=int, help="rounds between checkpoints, at most (1)")
    add("--data-dir", help="folder of the data sets")
    add("--output", type=Path, help="folder of the run (runs/federated-DATASET-ALGORITHM)")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--quiet", action="store_true", help="no progress bar")
    add("--list", action="store_true", help="list algorithms, settings and data sets, and stop")


def _epsilon(text: str) -> float | str:
    return text if text == "none" else float(text)


def run(options: argparse.Namespace) -> int:
    """Train; return the exit status: 0, 2 for what cannot be done, 130 after Ctrl-C."""
    from dpkernels.federated.outputs import CHECKPOINT
    from dpkernels.train.ending import exit_status, folder_of

    if options.list:
        print(_listing())
        return 0
    name = f"federated-{options.dataset or 'digits'}-{options.algorithm or 'ours'}"
    return exit_status(
        "federate",
        CHECKPOINT,
        lambda: folder_of(options.output, options.resume, name),
        lambda output: _federate(options, output),
    )


def _federate(options: argparse.Namespace, output: Path) -> str:
    """Train and return what is printed at the end."""
    from dataclasses import fields

    from dpkernels.federated.federate import federate
    from dpkernels.federated.options import Options, filled_in, resumed
    from dpkernels.federated.outputs import CHECKPOINT
    from dpkernels.train.alone import made_folder
    from dpkernels.train.ending import check_new

    given = {field.name: getattr(options, field.name) for field in fields(Options)}
    chosen = resumed(output, given) if options.resume else filled_in(given)
    with made_folder(output):
        if not options.resume:
            check_new(output, CHECKPOINT)
        outcome = federate(chosen, output, resume=options.resume, progress=not options.quiet)
    return f"{outcome.summary()}\nwritten to {output}"


def _listing() -> str:
    from dpkernels.federated.data import DATASETS
    from dpkernels.federated.options import MODELS
    from dpkernels.federated.partitions import PARTITIONS
    from dpkernels.federated.sampling import NAMED
    from dpkernels.federated.settings import ALGORITHMS

    lines = [
        f"data sets: {', '.join(DATASETS)}",
        f"partitions: {', '.join(PARTITIONS)}, natural",
        f"sampling: {NAMED}",
        f"models: {', '.join(MODELS)}",
        "algorithms:",
    ]
    width = max(map(len, ALGORITHMS))
    for name, known in ALGORITHMS.items():
        models = "networks" if known.network else "logistic or networks"
        takes = f"; {models}" if known.models else ""
        lines.append(f"  {name.ljust(width)}  {known.about}{takes}; {' or '.join(known.units)}")
        lines.append(f"  {' ' * width}    settings: {', '.join(known.settings)}")
    return "\n".join(lines)
