"""Beyond the paper: our own settings, against the best that the paper has at the same epsilon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpkernels.repro.dp_kfc import PLAIN, TABLES
from dpkernels.repro.tables import Block, Epsilon, Printed, Row, Table, cells

_EPSILONS = (1.0, 2.0, 8.0)
# Over the paper's settings: the defaults of ``dpkernels train`` for both data sets.
_TUNED: dict[str, Any] = {"batch_size": 1024, "epochs": 10, "lr": 4e-3}
_TUNED_ON = (
    "Damping and normalisation of the factors, batch, epochs and rate were chosen for DP-KFC, "
    "one after the other, by accuracy on the last 10,000 of FashionMNIST's training images at "
    "epsilon 1, one seed, trained on the other 50,000; MNIST's last 10,000 were looked at, too, "
    "before the choice was final. Test images were not. DP-SGD has the same batch, epochs and "
    "rate. That search is not in epsilon."
)
# What may be beaten: the oracle and training without noise have no guarantee.
_NO_GUARANTEE = ("dp-kfc-oracle", "sgd")


def best_printed(dataset: str, epsilon: Epsilon, method: str | None = None) -> Printed | None:
    """Return the paper's best cell with a guarantee, of any table; None if it has none.

    method: one method's best instead of the best of all.
    """
    found = [
        replace(cell.printed, source=table.title)
        for table in TABLES.values()
        for cell in cells(table)
        if cell.block.settings.get("dataset") == dataset
        and cell.epsilon == epsilon
        and cell.row.method not in _NO_GUARANTEE
        and method in (None, cell.row.method)
        and cell.printed is not None
    ]
    return max(found, key=lambda printed: printed.mean, default=None)


def _block(title: str, dataset: str) -> Block:
    def row(label: str, method: str, rival: str | None) -> Row:
        printed: dict[Epsilon, Printed | None] = {
            epsilon: best_printed(dataset, epsilon, rival) for epsilon in _EPSILONS
        }
        return Row(label, method, printed, settings=_TUNED)

    rows = row("DP-SGD", "dp-sgd", "dp-sgd"), row("DP-KFC", "dp-kfc", None)
    return Block(title, rows, PLAIN[dataset])


TUNED = Table(
    "tuned",
    "Our own settings against the paper's best",
    (_block("MNIST", "mnist"), _block("FashionMNIST", "fashion")),
    (
        _TUNED_ON,
        "Sampling, delta and accounting are Table 1's.",
        "The paper's figure beside DP-SGD is its best DP-SGD, the one beside DP-KFC its best of "
        "any method with a guarantee, at the same epsilon.",
    ),
)
ALL_TABLES = {**TABLES, TUNED.name: TUNED}
