"""Settings that an earlier run of a table chose: its cells can be run again by themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dpkernels.repro.federated.runs import Place, settings
from dpkernels.repro.federated.study import Cell, Chosen, Key, key

_EARLIER = "The settings were chosen by an earlier run of this table"


def read_chosen(path: Path, cells: Sequence[Cell]) -> tuple[dict[Key, Chosen], str]:
    """Return the settings that the table in ``path`` chose for ``cells``, and who chose them.

    Raises ValueError if it has not got one of them.
    """
    told = json.loads(path.read_text())
    found: dict[Key, Chosen] = {}
    for cell in told["cells"]:
        kept = cell["chosen"]
        algorithm, centre = (
            None if kept[name] is None else settings(**dict(kept[name]))
            for name in ("algorithm", "centre")
        )
        place = Place(**cell["place"] | {"public": tuple(cell["place"]["public"])})
        at = place, cell["row"], cell["epsilon"], cell.get("sigma")
        assert algorithm is not None
        found[at] = Chosen(algorithm, centre, kept["rounds"], kept["accuracy"], kept["searched"])
    chosen = {}
    for wanted in cells:
        at = key(wanted)
        if at not in found:
            raise ValueError(
                f"chosen: {path} has no settings for {wanted.row.label!r} at {wanted.budget} with "
                f"{wanted.place}; leave --chosen out to choose them"
            )
        chosen[at] = found[at]
    note = f"{_EARLIER}, {told['provenance']['time']}."
    return chosen, next((said for said in told["notes"] if said.startswith(_EARLIER)), note)
