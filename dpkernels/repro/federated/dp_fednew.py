"""The tables of DP-FedNew: Adult (Table 8), EMNIST (Table 5), features, synthetic, views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpkernels.repro.federated.runs import Place
from dpkernels.repro.federated.study import Cell, Row, Table

EPSILONS: tuple[float, ...] = (0.1, 1.0, 10.0)
_PAPER = "DP-FedNew"

# Table 8, accuracy in percent after 70 rounds, epsilon .1 / 1 / 10, by the number of clients.
_ADULT: dict[int, dict[str, tuple[float, float, float]]] = {
    10: {
        "DP-FedFC": (82.4, 83.1, 84.1),
        "DP-FedGD": (82.2, 82.3, 82.2),
        "DP-FedNew": (82.4, 83.3, 83.2),
        "DP-FedNew-FC": (82.3, 83.3, 83.4),
        "DP-Scaffold": (81.4, 81.8, 81.8),
    },
    100: {
        "DP-FedFC": (82.3, 83.3, 83.9),
        "DP-FedGD": (82.1, 82.2, 82.2),
        "DP-FedNew": (82.3, 83.3, 83.2),
        "DP-FedNew-FC": (82.2, 82.9, 83.4),
        "DP-Scaffold": (79.3, 81.8, 81.8),
    },
    250: {
        "DP-FedFC": (82.3, 83.3, 84.1),
        "DP-FedGD": (82.1, 82.3, 82.2),
        "DP-FedNew": (81.9, 83.4, 83.3),
        "DP-FedNew-FC": (81.8, 82.8, 83.0),
        "DP-Scaffold": (77.8, 81.2, 82.2),
    },
    500: {
        "DP-FedFC": (82.0, 83.4, 84.2),
        "DP-FedGD": (82.1, 82.2, 82.2),
        "DP-FedNew": (82.2, 83.4, 83.3),
        "DP-FedNew-FC": (82.2, 82.6, 83.0),
        "DP-Scaffold": (76.6, 81.1, 82.2),
    },
}
# Table 5, the same of Federated EMNIST.
_EMNIST: dict[int, dict[str, tuple[float, float, float]]] = {
    47: {
        "DP-FedNew-FC": (39.0, 58.2, 62.9),
        "DP-Scaffold": (13.5, 41.6, 55.8),
        "DP-FedFC": (39.0, 56.9, 59.5),
        "DP-FedGD": (38.9, 53.3, 56.9),
    },
    100: {
        "DP-FedNew-FC": (38.3, 58.4, 62.7),
        "DP-Scaffold": (8.5, 36.1, 49.2),
        "DP-FedFC": (38.2, 56.5, 58.0),
        "DP-FedGD": (38.3, 55.8, 56.4),
    },
    250: {
        "DP-FedNew-FC": (37.6, 58.2, 63.1),
        "DP-Scaffold": (6.7, 29.3, 37.0),
        "DP-FedFC": (38.4, 56.6, 58.7),
        "DP-FedGD": (38.5, 55.3, 54.4),
    },
    500: {
        "DP-FedNew-FC": (38.4, 59.3, 64.9),
        "DP-Scaffold": (5.3, 20.5, 24.9),
        "DP-FedFC": (40.1, 57.5, 66.9),
        "DP-FedGD": (39.1, 55.5, 55.8),
    },
    1000: {
        "DP-FedNew-FC": (37.7, 58.4, 63.3),
        "DP-Scaffold": (4.4, 11.5, 12.8),
        "DP-FedFC": (39.0, 57.1, 57.0),
        "DP-FedGD": (38.9, 55.5, 56.6),
    },
}

# The paper's grid for FedNew; eta = C1 = C2 = Delta_H = 1.
_ADMM = {"alpha": (0.01, 0.1, 1.0), "rho": (0.01, 0.1, 1.0, 10.0, 100.0)}
_FEW = {"alpha": (0.1, 1.0), "rho": (0.1, 1.0, 10.0)}
_OF_PAPER = {"dual": "uploaded", "rescale": "xi"}


def _centre(feature_clip: float) -> dict[str, float]:
    return {"feature_clip": feature_clip, "share": 0.05, "bias": 1.0}


_GD = Row("DP-FedGD", "fedgd", {"lr": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}, {"clip": 1.0})
_MOMENTUM = Row(
    "DP-FedGD, momentum 0.9",
    "fedgd",
    {"lr": (0.25, 0.5, 1.0, 2.0), "clip": (0.5, 1.0, 2.0), "average": (0.0, 0.3)},
    {"momentum": 0.9},
)
_FC = Row(
    "DP-FedFC",
    "fedfc",
    {"lr": (0.05, 0.2, 0.5, 1.0), "gamma": (0.01, 0.1), "feature_clip": (1.0, 3.75)},
    {"clip": 1.0},
)
_NEW = Row("DP-FedNew", "fednew", _ADMM, {"hessian": "cg"})
_NEW_FC = Row("DP-FedNew-FC", "fednew", _ADMM, {"hessian": "covariance"})
_NEW_0 = Row("DP-FedNew, H = 0", "fednew", _ADMM, {"hessian": "none"})
_NEW_DUAL = Row("DP-FedNew, dual uploaded", "fednew", _ADMM, {"hessian": "cg", "dual": "uploaded"})
_NEW_BALL = Row(
    "DP-FedNew-FC, clean dual in a ball",
    "fednew",
    _FEW | {"radius": (0.3, 1.0)},
    {"hessian": "covariance", "dual": "clean"},
)
_NEW_PAPER = Row("DP-FedNew, the paper's steps", "fednew", _ADMM, {"hessian": "cg", **_OF_PAPER})
_NEW_FC_PAPER = Row(
    "DP-FedNew-FC, the paper's steps", "fednew", _ADMM, {"hessian": "covariance", **_OF_PAPER}
)
_SCAFFOLD = Row(
    "DP-Scaffold",
    "scaffold",
    {"local_steps": (2, 5), "local_lr": (0.25, 1.0, 4.0)},
    {"clip": 1.0, "control": "uploaded"},
)
_OURS = Row(
    "ours: centred FedGD, momentum 0.9",
    "fedgd",
    {"lr": (0.25, 0.5, 1.0, 2.0), "clip": (0.5, 1.0, 2.0), "average": (0.0, 0.3)},
    {"momentum": 0.9},
    centre=_centre(4.0),
)


def _cells(
    places: Sequence[Place],
    rows: Sequence[Row],
    epsilons: Sequence[float],
    printed: dict[int, dict[str, tuple[float, float, float]]],
) -> tuple[Cell, ...]:
    found = []
    for place in places:
        figures = printed.get(place.clients, {})
        for row in rows:
            # What the paper printed, it made with its own steps.
            label = row.label.removesuffix(", the paper's steps")
            for epsilon in epsilons:
                known = figures.get(label) if place.view == "aggregate" else None
                at = EPSILONS.index(epsilon) if epsilon in EPSILONS else None
                paper = known[at] if known is not None and at is not None else None
                found.append(Cell(place, row, epsilon, paper))
    return tuple(found)


_CHOICE = (
    "Settings were chosen on held-out training records by two seeds that are not reported; the "
    "paper chose on test accuracy. Epsilon covers neither choice."
)
_SOUND = (
    "Rows without a remark are sound: duals are left out (dual='none'), s is projected, and the "
    "sensitivity is the one of FedNew's docstring. 'The paper's steps' (xi, duals of noisy uploads "
    "under secure aggregation) and DP-Scaffold under secure aggregation have no guarantee; their "
    "noise is what the paper would add for the epsilon of the column."
)


def table8(clients: Sequence[int] = (10, 100, 250, 500)) -> Table:
    """Return Table 8: Adult, 123 x 2, secure aggregation, record level."""
    rows = (_GD, _MOMENTUM, _FC, _NEW, _NEW_FC, _NEW_0, _NEW_PAPER, _NEW_FC_PAPER, _SCAFFOLD, _OURS)
    places = [Place("adult", n) for n in clients]
    cells = _cells(places, rows, EPSILONS, _ADULT)
    return Table(_PAPER, "8", "Adult, IID, 123 x 2, T = 70", cells, 6000, (_CHOICE, _SOUND))


def views(clients: Sequence[int] = (10, 100, 250, 500)) -> Table:
    """Return FedNew under sound accounting: views and duals, on Adult."""
    cells: list[Cell] = []
    for n in clients:
        aggregate = Place("adult", n)
        seen = replace(aggregate, view="each_upload")
        rows = (_MOMENTUM, _NEW_0, _NEW, _NEW_FC, _NEW_BALL)
        cells += _cells([aggregate], rows, EPSILONS, {})
        cells += _cells([seen], (_MOMENTUM, _NEW_0, _NEW, _NEW_DUAL), EPSILONS, {})
    note = "Every row is sound under the view that it stands in."
    caption = "DP-FedNew under sound accounting, Adult, T = 70"
    return Table(_PAPER, "views", caption, tuple(cells), 6000, (_CHOICE, note))


def table5(clients: Sequence[int] = (47, 100, 250, 500, 1000)) -> Table:
    """Return Table 5: EMNIST, at most two classes a client, PCA to 100, 100 x 47."""
    few = {"lr": (1.0, 4.0, 16.0)}
    rows = (
        replace(_GD, grid={"lr": (2.0, 8.0, 32.0)}),
        replace(_MOMENTUM, grid=few | {"clip": (0.5, 1.0)}),
        replace(_FC, grid={"lr": (0.2, 1.0, 4.0), "gamma": (0.1,), "feature_clip": (5.0, 15.0)}),
        replace(_NEW_FC, grid={"alpha": (0.01, 0.1), "rho": (0.1, 1.0)}),
        replace(_SCAFFOLD, grid={"local_steps": (2,), "local_lr": (1.0, 4.0)}),
        replace(
            _OURS,
            grid=few | {"clip": (0.5, 1.0)},
            centre=_centre(10.0),
        ),
    )
    places = [Place("emnist-bymerge", n, "classes:2", ("pca:100",)) for n in clients]
    notes = (
        _CHOICE,
        _SOUND,
        "EMNIST ByMerge's test part, split, stands in for EMNIST Balanced: 100,000 unbalanced "
        "training records, the paper has 112,800 balanced ones. Levels are not comparable, order "
        "and differences are.",
        "PCA is declared public, as in the paper: epsilon does not cover it.",
    )
    cells = _cells(places, rows, EPSILONS, _EMNIST)
    return Table(
        _PAPER, "5", "EMNIST ByMerge, 2 classes a client, 100 x 47, T = 70", cells, 10000, notes
    )


def features(clients: Sequence[int] = (500,)) -> Table:
    """Return the curves on CIFAR-10 and Fashion features, 64 x 10 (the paper's Figure 1)."""
    scaled = {"lr": (0.05, 0.2, 0.8), "clip": (1.0, 3.0, 10.0)}
    rows = (
        replace(_GD, grid=scaled, fixed={}),
        replace(_MOMENTUM, grid={"lr": (0.02, 0.05, 0.2), "clip": (1.0, 3.0, 10.0)}),
        replace(
            _FC, grid={"lr": (0.2, 0.5, 1.0), "gamma": (0.1, 1.0), "feature_clip": (5.0, 12.0)}
        ),
        replace(_NEW, grid=_FEW | {"hessian_clip": (1.0, 10.0)}),
        replace(_NEW_FC, grid=_FEW | {"hessian_clip": (1.0, 10.0)}),
        replace(_NEW_0, grid=_FEW),
        replace(
            _SCAFFOLD,
            grid={"local_steps": (2,), "local_lr": (0.1, 0.5), "clip": (1.0, 10.0)},
            fixed={"control": "uploaded"},
        ),
        replace(
            _OURS,
            grid={"lr": (0.05, 0.2, 0.8), "clip": (1.0, 3.0, 10.0)},
            centre=_centre(12.0),
        ),
    )
    places = [Place(name, n) for name in ("cifar10-features", "fashion-features") for n in clients]
    cells = _cells(places, rows, EPSILONS, {})
    caption = "features of a ResNet-20, IID, 64 x 10, T = 70"
    return Table(_PAPER, "features", caption, cells, 6000, (_CHOICE, _SOUND))


def synthetic(clients: Sequence[int] = (100,)) -> Table:
    """Return clients that differ: Noble et al.'s generator at alpha = beta = 5, 60 x 10."""
    rows = (
        replace(_GD, grid={"lr": (0.02, 0.1, 0.5, 2.0)}),
        replace(_MOMENTUM, grid={"lr": (0.02, 0.1, 0.5), "clip": (1.0, 3.0)}),
        replace(
            _FC, grid={"lr": (0.1, 0.5, 2.0), "gamma": (0.1, 1.0), "feature_clip": (3.0, 10.0)}
        ),
        replace(_NEW, grid=_FEW),
        replace(_NEW_FC, grid=_FEW),
        replace(_NEW_0, grid=_FEW),
        replace(_SCAFFOLD, grid={"local_steps": (2, 5), "local_lr": (0.1, 0.5)}),
        replace(_OURS, grid={"lr": (0.02, 0.1, 0.5), "clip": (1.0, 3.0)}),
    )
    places = [Place("synthetic:5,5", n, "natural") for n in clients]
    cells = _cells(places, rows, EPSILONS, {})
    return Table(
        _PAPER, "synthetic", "synthetic(5, 5), 60 x 10, T = 70", cells, 4000, (_CHOICE, _SOUND)
    )


def users(clients: Sequence[int] = (500,)) -> Table:
    """Return user level on Adult: whole clients are protected, secure aggregation."""
    rows = (
        Row("DP-FedGD", "fedgd", {"lr": (1.0, 4.0, 16.0), "clip": (0.1, 0.3, 1.0)}),
        replace(_MOMENTUM, grid={"lr": (0.25, 1.0, 4.0), "clip": (0.1, 0.3, 1.0)}),
        Row(
            "DP-FedFC",
            "fedfc",
            {"lr": (0.1, 0.5), "gamma": (0.1, 1.0), "clip": (0.3, 1.0)},
            {"feature_clip": 3.75},
        ),
        Row(
            "DP-FedNew, clean dual",
            "fednew",
            _FEW | {"clip": (0.3, 1.0)},
            {"hessian": "cg", "dual": "clean"},
        ),
        Row("DP-FedNew", "fednew", _FEW | {"clip": (0.3, 1.0)}, {"hessian": "cg"}),
        Row(
            "DP-Scaffold, clean control",
            "scaffold",
            {"local_steps": (5,), "local_lr": (0.25, 1.0), "clip": (0.3, 1.0, 3.0)},
            {"control": "clean"},
        ),
        Row(
            "DP-Scaffold, no control",
            "scaffold",
            {"local_steps": (5,), "local_lr": (0.25, 1.0), "clip": (0.3, 1.0, 3.0)},
            {"control": "none"},
        ),
    )
    places = [Place("adult", n, unit="user") for n in clients]
    cells = _cells(places, rows, (1.0, 10.0), {})
    note = "Every row is sound: what a client keeps is made of its own clipped upload before noise."
    return Table(_PAPER, "users", "user level, Adult, IID, T = 70", cells, 6000, (_CHOICE, note))


TABLES = {
    "8": table8,
    "5": table5,
    "views": views,
    "features": features,
    "synthetic": synthetic,
    "users": users,
}
