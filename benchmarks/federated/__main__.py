"""Measure federated rounds: ``python -m benchmarks.federated all``, or one part of it.

Parts: ``round`` (against per-client loops and batched PyTorch), ``profile`` (where our time goes),
``growth``, ``memory``, ``local`` (local training of neural networks against a per-client loop),
``fold`` (FedCEO's server step beside that), ``merging`` (FedFisher's server step against Adam in
PyTorch), ``peers`` (pfl-research, Flower) and ``peers_cifar`` (the same two on pfl-research's
CIFAR-10 shape). ``peers --prepare`` makes the peers' environments in ``build/peers`` and measures
nothing. A part writes ``federated_<part>.json``, and a table or a picture of it, to
``benchmarks/results``; ``all --resume`` leaves out parts that were measured at this commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.federated import (
    breakdown,
    compare,
    folded,
    growth,
    local,
    memory,
    merging,
    ours,
)
from benchmarks.federated.peers import measure as peers
from benchmarks.federated.peers.environments import prepare
from benchmarks.federated.workload import Size
from benchmarks.timing import Budget
from dpkernels import backend

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_SIZE = Size()
Found = list[dict[str, Any]]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _round(options: argparse.Namespace) -> Found:
    found = []
    for algorithm in ours.ALGORITHMS:
        _say(algorithm)
        budget = Budget(options.seconds)
        found.append(asdict(compare.compare(algorithm, _SIZE, options.threads, budget)))
        _say(compare.table(found[-1:]))
    return found


def _profile(options: argparse.Namespace) -> Found:
    found = []
    for algorithm in ours.ALGORITHMS:
        rounds = 5 if algorithm == "FedNew-exact" else 50
        for threads in sorted({1, options.threads}):
            found.append(asdict(breakdown.breakdown(algorithm, _SIZE, threads, rounds)))
    return found


def _growth(options: argparse.Namespace) -> Found:
    found = []
    for axis in growth.AXES:
        for at in axis.sizes:
            _say(f"{axis.name}: {at}")
            points = growth.points(axis, at, options.threads, Budget(options.seconds / 5))
            found += [asdict(point) for point in points]
    return found


def _memory(options: argparse.Namespace) -> Found:
    torch.set_num_threads(options.threads)
    algorithms = ("FedNew-exact", "FedNew-cg")
    return [asdict(memory.measure(name, size)) for size in memory.SIZES for name in algorithms]


def _local(options: argparse.Namespace) -> Found:
    return local.run(options.threads, options.seconds)


def _fold(options: argparse.Namespace) -> Found:
    return folded.run(options.seconds)


def _merging(options: argparse.Namespace) -> Found:
    return merging.run()


def _peers(options: argparse.Namespace) -> Found:
    budget = Budget(options.seconds)
    rounds = peers.rounds_of_all(_SIZE, options.threads, options.peer_rounds, budget)
    return [asdict(one) for one in rounds]


def _peers_cifar(options: argparse.Namespace) -> Found:
    budget = Budget(options.seconds, options.own_rounds)
    rounds = peers.rounds_on_cifar(options.threads, options.peer_rounds, budget)
    return [asdict(one) for one in rounds]


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "round": _round,
    "profile": _profile,
    "growth": _growth,
    "memory": _memory,
    "local": _local,
    "fold": _fold,
    "merging": _merging,
    "peers": _peers,
    "peers_cifar": _peers_cifar,
}
_TABLES: dict[str, Callable[[Found], str]] = {
    "round": compare.table,
    "profile": breakdown.table,
    "memory": memory.table,
    "local": local.table,
    "fold": folded.table,
    "merging": merging.table,
    "peers": peers.table,
    "peers_cifar": peers.table,
}

_WHAT = {
    "memory": "512 x 10, 256 records",
    "local": "Local SGD",
    "fold": "FedCEO's server step, float32",
    "merging": "FedFisher's server step, 5 clients, float32; in brackets what is left of f",
    "peers_cifar": "50 clients x 50 images of 3 x 32 x 32, batches of 10, one local epoch, CNN of "
    "1,626,442 parameters",
}


def _title(part: str, where: dict[str, Any]) -> str:
    what = _WHAT.get(part, str(_SIZE))
    dirty = " with uncommitted changes" if where["dirty"] else ""
    return (
        f"{what}. {where['cpu']}, {where['threads']} threads, "
        f"{where['instruction_set']['dpkernels']}; torch {where['versions']['torch']}; "
        f"commit {str(where['commit'])[:9]}{dirty}, {where['time'][:10]}; `{where['command']}`"
    )


def show(part: str, output: Path) -> None:
    """Write the table or the picture of a part from its JSON."""
    read = json.loads((output / f"federated_{part}.json").read_text())
    title, found = _title(part, read["provenance"]), read["results"]
    if part == "growth":
        growth.picture(found, output / "federated_growth.png", title.partition(". ")[2])
        return
    text = _TABLES[part](found)
    (output / f"federated_{part}.md").write_text(f"{title}\n\n{text}\n")
    print(text)


def _measured(part: str, output: Path, where: dict[str, Any]) -> bool:
    """Whether the part was measured at this commit, with nothing changed since."""
    path = output / f"federated_{part}.json"
    if not path.exists() or where["dirty"]:
        return False
    before = json.loads(path.read_text())["provenance"]
    return bool(before["commit"] == where["commit"] and not before["dirty"])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.prepare:
        prepare()
        return 0
    output: Path = options.output
    if options.again:
        for part in PARTS:
            if (output / f"federated_{part}.json").exists():
                show(part, output)
        return 0
    if backend.extension is None:
        sys.exit("benchmarks.federated: dpkernels._C is not built; run make build")
    torch.set_num_threads(options.threads)
    command = " ".join(["python -m benchmarks.federated", options.part])
    where = provenance.collect(torch.device("cpu")) | {"command": command}
    output.mkdir(parents=True, exist_ok=True)
    for part in PARTS if options.part == "all" else (options.part,):
        if options.resume and _measured(part, output, where):
            _say(f"{part}: measured before")
            continue
        found = PARTS[part](options)
        written = {"provenance": where | {"seconds": options.seconds}, "results": found}
        (output / f"federated_{part}.json").write_text(json.dumps(written, indent=1) + "\n")
        show(part, output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.federated", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--prepare", action="store_true", help="make the peers' environments")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long for each algorithm")
    parser.add_argument("--peer-rounds", type=int, default=9, help="rounds of each peer")
    parser.add_argument("--own-rounds", type=int, help="of ours in peers_cifar (by --seconds)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--resume", action="store_true", help="leave out what was measured")
    parser.add_argument("--again", action="store_true", help="measure nothing; show results again")
    parser.add_argument("--output", type=Path, default=_RESULTS, metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
