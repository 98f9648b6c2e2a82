"""Beyond the paper: our own settings, against the best that the paper has at the same epsilon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpkernels.repro.dp_kfc import PLAIN, TABLES
from dpkernels.repro.search import SEARCH
from dpkernels.repro.tables import Block, Epsilon, Printed, Row, Table, cells

_EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
# Over the paper's settings: the defaults of ``dpkernels train`` for both data sets.
_TUNED: dict[str, Any] = {"batch_size": 512, "epochs": 10, "lr": 2e-3, "accountant": "pld"}
# DP-SGD's best are others.
DP_SGD: dict[str, Any] = {"batch_size": 1024, "lr": 4e-3}
_TUNED_ON = (
    "Factors of DP-KFC, and batch and rate of DP-KFC and of DP-SGD, which had more rates, were "
    "chosen on training images of FashionMNIST that were left out, at epsilon 1 (the table "
    "search). Some trainings on held-out images of MNIST were looked at before. Nothing was "
    "chosen on test images or for another epsilon. The search is not in epsilon."
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
        own = DP_SGD if method == "dp-sgd" else {}
        return Row(label, method, printed, settings={**_TUNED, **own})

    rows = row("DP-SGD", "dp-sgd", "dp-sgd"), row("DP-KFC", "dp-kfc", None)
    return Block(title, rows, PLAIN[dataset])


TUNED = Table(
    "tuned",
    "Our own settings against the paper's best",
    (_block("MNIST", "mnist"), _block("FashionMNIST", "fashion")),
    (
        _TUNED_ON,
        "Sampling and delta are Table 1's. Noise is accounted by privacy loss distributions, which "
        "are tighter than the paper's Renyi divergences: 5 to 8% less of it.",
        "The paper's figure beside DP-SGD is its best DP-SGD, the one beside DP-KFC its best of "
        "any method with a guarantee, at the same epsilon.",
    ),
)
ALL_TABLES = {**TABLES, SEARCH.name: SEARCH, TUNED.name: TUNED}
