"""Private FedFisher against DP-FedAvg, one round each, at the same epsilon and the same search.

Here everything is released through ``Federation``: the budget covers models, factors and counts.
"""

from __future__ import annotations

from dpkernels.repro.federated.fedfisher.scene import PAPERS_PARTITION
from dpkernels.repro.federated.runs import Place
from dpkernels.repro.federated.study import Cell, Row, Table

EPSILONS = (8.0, 2.0)
ALPHA, CLIENTS, DELTA = 0.1, 5, 1e-5
VALIDATION = 4000
_BATCH, _RECORDS = 256, 60_000
_HELD_BATCH = _BATCH * (_RECORDS - VALIDATION) // _RECORDS

PLACE = Place(
    "fashion",
    CLIENTS,
    f"dirichlet:{ALPHA:g}",
    unit="record",
    view="each_upload",
    adjacency="add-remove",
    delta=DELTA,
    model="lenet",
    record_rate=_BATCH * CLIENTS / _RECORDS,
    partition_seed=PAPERS_PARTITION,
)
# The same for every row, so that none is chosen from more.
_GRID = {"local_lr": (0.1, 0.3, 1.0), "local_steps": (300, 1000)}


def _fedfisher(label: str, factors: str, **more: str) -> Row:
    return Row(label, "fedfisher", _GRID, {"factors": factors, **more}, rounds=(1,))


ROWS = (
    Row("DP-FedAvg", "local-dpsgd", _GRID, {}, rounds=(1,)),
    _fedfisher("DP-FedAvg, weighted by noisy counts", "none"),
    _fedfisher("private FedFisher, K-FAC by one query", "records"),
    _fedfisher("private FedFisher, diagonal by one query", "records", fisher="diagonal"),
    _fedfisher("private FedFisher, K-FAC of synthetic probes", "probes"),
)


def table(place: Place = PLACE) -> Table:
    """Return accuracy over epsilon."""
    cells = tuple(Cell(place, row, epsilon) for epsilon in EPSILONS for row in ROWS)
    notes = (
        "One round of five clients on the authors' partition. A record is with one client: epsilon "
        "is the largest client's, and covers models, factors and counts of records. Each upload is "
        "seen.",
        f"Rate and number of local steps were chosen for every row from the same grid, on "
        f"{VALIDATION:,} held-out training records by two seeds that are not reported; epsilon "
        "does not cover it. A local step draws records by chance, "
        f"{_BATCH} of a mean client's on average ({_HELD_BATCH} where settings are chosen).",
        "Pixels are scaled by FashionMNIST's published constants.",
    )
    caption = "accuracy over epsilon, one private round"
    return Table("FedFisher", "private", caption, cells, VALIDATION, notes)
