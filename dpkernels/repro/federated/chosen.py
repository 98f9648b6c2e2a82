"""Settings that an earlier run of a table chose: its cells can be run again by themselves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from dpkernels.repro.federated.runs import settings
from dpkernels.repro.federated.study import Cell, Chosen, Key, key

_EARLIER = "The settings were chosen by an earlier run of this table"


def read_chosen(path: Path, cells: Sequence[Cell]) -> tuple[dict[Key, Chosen], str]:
    """Return the settings that the table in ``path`` chose for ``cells``, and who chose them.

    Raises ValueError if it has not got one of them.
    """
    told = json.loads(path.read_text())
    found: dict[tuple[str, str, float | None], Chosen] = {}
    for cell in told["cells"]:
        kept = cell["chosen"]
        algorithm, centre = (
            None if kept[name] is None else settings(**dict(kept[name]))
            for name in ("algorithm", "centre")
        )
        at = json.dumps(cell["place"], sort_keys=True), cell["row"], cell["epsilon"]
        assert algorithm is not None
        found[at] = Chosen(algorithm, centre, kept["rounds"], kept["accuracy"], kept["searched"])
    chosen = {}
    for wanted in cells:
        place = json.dumps(dataclasses.asdict(wanted.place), sort_keys=True)
        at = place, wanted.row.label, wanted.epsilon
        if at not in found:
            raise ValueError(
                f"chosen: {path} has no settings for {wanted.row.label!r} at epsilon "
                f"{wanted.epsilon} with {wanted.place}; leave --chosen out to choose them"
            )
        chosen[key(wanted)] = found[at]
    note = f"{_EARLIER}, {told['provenance']['time']}."
    return chosen, next((said for said in told["notes"] if said.startswith(_EARLIER)), note)
