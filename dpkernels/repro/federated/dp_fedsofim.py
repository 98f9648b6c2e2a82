"""Table 1 of DP-FedSOFIM: CIFAR-10 features, 20 clients, 70 rounds, every upload seen."""

from __future__ import annotations

from dpkernels.repro.federated.runs import Place
from dpkernels.repro.federated.study import Cell, Row, Table

PLACE = Place("cifar10-features", 20, view="each_upload", adjacency="replace-one", delta=1e-5)
VALIDATION = 5000
EPSILONS: tuple[float | None, ...] = (0.5, 1.0, 2.0, 5.0, 10.0, None)

# The paper's grid, chosen there on test accuracy.
_PAPER_RATES = (0.05, 0.1, 0.12, 0.15, 0.18, 0.2, 0.5, 1.0)
# Rates around it: on these features the mean is most of a record's norm, and FedSOFIM is unstable
# from lr / rho = 0.3 on, FedGD from 0.4 on.
_RATES = (0.01, 0.02, 0.03, *_PAPER_RATES, 0.13, 0.14, 0.25, 0.3)

# Accuracy after 10, 20, ... 70 rounds.
PAPER: dict[str, dict[float | None, tuple[float, ...]]] = {
    "DP-FedGD": {
        None: (51.50, 59.20, 62.65, 64.21, 65.31, 65.95, 66.41),
        0.5: (44.97, 54.45, 58.71, 60.09, 60.40, 61.06, 60.43),
        1.0: (51.35, 58.98, 62.15, 63.31, 64.12, 64.13, 64.19),
        2.0: (51.30, 59.43, 62.51, 64.04, 65.13, 65.41, 65.59),
        5.0: (52.94, 60.37, 63.29, 64.79, 65.79, 66.16, 66.44),
        10.0: (52.93, 60.19, 63.17, 64.72, 65.81, 66.18, 66.60),
    },
    "DP-FedSOFIM": {
        None: (60.32, 66.01, 67.17, 68.42, 69.08, 69.37, 69.53),
        0.5: (40.10, 53.60, 59.03, 61.36, 61.23, 60.94, 61.03),
        1.0: (45.42, 58.00, 62.92, 64.66, 64.72, 64.69, 64.61),
        2.0: (46.47, 60.57, 64.28, 65.96, 66.32, 66.71, 66.75),
        5.0: (60.36, 66.55, 67.66, 68.17, 67.85, 68.05, 68.00),
        10.0: (60.22, 66.50, 68.02, 68.59, 68.78, 68.80, 68.97),
    },
}

_RHO = 0.5
_PLAIN = {"clip": 10.0}
_SOFIM = {"clip": 10.0, "rho": _RHO, "beta": 0.9}
ROWS = (
    Row("DP-FedGD", "fedgd", {"lr": _RATES}, _PLAIN),
    Row("DP-FedSOFIM", "fedsofim", {"lr": _RATES}, _SOFIM),
    Row(
        "DP-FedGD at FedSOFIM's lr / rho",
        "fedgd",
        fixed=_PLAIN,
        like="DP-FedSOFIM",
        transfer=lambda found: {"lr": found["lr"] / _RHO},
    ),
    Row(
        "DP-FedSOFIM at FedGD's lr rho",
        "fedsofim",
        fixed=_SOFIM,
        like="DP-FedGD",
        transfer=lambda found: {"lr": found["lr"] * _RHO},
    ),
    Row(
        "DP-FedGD, clip tuned",
        "fedgd",
        {"lr": _RATES, "clip": (2.0, 5.0, 10.0)},
    ),
    Row(
        "DP-FedSOFIM, clip tuned",
        "fedsofim",
        {"lr": _RATES, "clip": (2.0, 5.0, 10.0)},
        {"rho": _RHO, "beta": 0.9},
    ),
    Row(
        "DP-FedSOFIM, clip, rho and beta tuned",
        "fedsofim",
        {
            "lr": (0.01, 0.03, 0.1, 0.3, 1.0),
            "clip": (2.0, 5.0, 10.0),
            "rho": (0.05, 0.2, 1.0, 4.0),
            "beta": (0.5, 0.9),
        },
    ),
    Row(
        "DP-FedGD, momentum 0.9",
        "fedgd",
        {"lr": (0.01, 0.02, 0.05, 0.1, 0.2), "clip": (5.0, 10.0)},
        {"momentum": 0.9},
    ),
    Row(
        "ours: centred FedGD, averaged",
        "fedgd",
        {
            "lr": (0.5, 1.0, 2.0, 4.0),
            "clip": (2.0, 3.0, 5.0, 8.0),
            "momentum": (0.0, 0.5),
            "average": (0.3, 0.5),
        },
        rounds=(20, 40, 70),
        centre={"feature_clip": 12.0, "share": 0.05, "bias": 1.0},
    ),
)


def table() -> Table:
    """Return Table 1."""
    cells = []
    for epsilon in EPSILONS:
        for row in ROWS:
            printed = PAPER.get(row.label, {}).get(epsilon)
            cells.append(Cell(PLACE, row, epsilon, None if printed is None else printed[-1]))
    notes = (
        "The paper's accounting (63): every upload is seen, one record is replaced, all rounds "
        "count. It is sound.",
        "Settings were chosen on 5,000 held-out training records by two seeds that are not "
        "reported; the paper chose on test accuracy. Epsilon covers neither choice.",
        "Features are 64 numbers of a ResNet-20 trained on CIFAR-100; the paper's network is of "
        "the same kind, its features are not published. They are used as they are.",
        "Rows at equal lr / rho take the other row's chosen rate: what is left of the difference "
        "is what M M^T does. It takes away: at equal lr / rho FedSOFIM is below FedGD at every "
        "epsilon, most where there is most noise, because M M^T is the outer product of a noisy "
        "mean gradient, and shortens the step along it.",
        "Ours: the mean of the features is released for 5% of the budget, gradients of centred "
        "features are clipped, iterates are averaged; 20, 40 or 70 rounds.",
    )
    caption = "Table 1, CIFAR-10 features, 20 clients"
    return Table("DP-FedSOFIM", "1", caption, tuple(cells), VALIDATION, notes, PAPER)
