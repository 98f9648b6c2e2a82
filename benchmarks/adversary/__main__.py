"""Run the attacks: ``python -m benchmarks.adversary``.

Prints a table and writes ``adversary.json`` and ``adversary.md``. The first run in a file is its
column "before", and stays; later ones are "after". The exit code says whether all claims held.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks import provenance
from benchmarks.adversary import layouts, mixing, noise, passes, record, rounding, sampling, state
from benchmarks.adversary.attack import Attack, Outcome

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_ROOMS = (rounding, passes, layouts, state, noise, sampling, mixing)
ATTACKS: list[Attack] = sorted(
    (one for room in _ROOMS for one in room.ATTACKS), key=lambda one: one.item
)


def launch(attacks: list[Attack]) -> list[Outcome]:
    """Run the attacks in one thread, so that figures are the same on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outcomes = []
    try:
        for one in attacks:
            outcomes.append(one.launch())
            mark = "holds" if outcomes[-1].held else "HOLE "
            print(f"{mark} {one.item:2} {one.name}: {outcomes[-1]}", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a claim did not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adversary", description=__doc__)
    parser.add_argument("--only", default="", help="attacks with this in their name; no file")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of the two files")
    options = parser.parse_args(arguments)
    where = provenance.collect(torch.device("cpu"))
    outcomes = launch([one for one in ATTACKS if options.only in one.name])
    path = options.results / "adversary.json"
    runs = {} if options.only else record.read(path)
    runs["after" if "before" in runs else "before"] = record.as_json(where, outcomes)
    print(record.table(runs))
    if not options.only:
        path.write_text(json.dumps(runs, indent=1) + "\n")
        path.with_suffix(".md").write_text(record.markdown(runs))
    return 0 if all(one.held for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
