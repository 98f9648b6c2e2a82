"""What a table of a paper is: blocks of rows of cells, and how each is run here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# None stands for training without privacy.
Epsilon = float | None


@dataclass(frozen=True)
class Printed:
    """Test accuracy in percent, mean and standard deviation, as the paper has them.

    spread: None where the paper, or the copy of it that was read, has none.
    source: the table that it is from, if that is another than the one it is shown in.
    """

    mean: float
    spread: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class Row:
    """One method of one block.

    method: what ``dpkernels train`` calls it.
    printed: the row's epsilons, with the paper's figures where it has them.
    not_run: why it is not run here, if so.
    settings: options of ``dpkernels train`` of this row, over the block's.
    elsewhere: figures of other tables, for epsilons that the row lacks.
    """

    label: str
    method: str
    printed: Mapping[Epsilon, Printed | None]
    not_run: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Mapping[Epsilon, Printed] = field(default_factory=dict)

    def figure(self, epsilon: Epsilon) -> Printed | None:
        """Return what the paper printed, here or elsewhere; None if nothing."""
        return self.printed.get(epsilon) or self.elsewhere.get(epsilon)


@dataclass(frozen=True)
class Block:
    """The rows of one data set.

    settings: options of ``dpkernels train`` that all rows share, but for those of their own.
    not_run: why no row of it is run here, if so.
    """

    title: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    not_run: str | None = None


@dataclass(frozen=True)
class Table:
    """One table.

    name: the paper's number, or a word for one that the paper does not have.
    notes: where the run here differs from the paper's.
    measured: what the figures are.
    """

    name: str
    caption: str
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    measured: str = "test accuracy"

    @property
    def title(self) -> str:
        """The name as people write it."""
        return f"Table {self.name}" if self.name.isdigit() else self.name


@dataclass(frozen=True, eq=False)
class Cell:
    """One number of a table. printed: None for an epsilon that the paper does not have."""

    block: Block
    row: Row
    epsilon: Epsilon
    printed: Printed | None

    @property
    def not_run(self) -> str | None:
        """Why it is not run here, if so."""
        return self.block.not_run or self.row.not_run

    @property
    def key(self) -> tuple[str, str, Epsilon]:
        """What tells it from the table's other cells."""
        return self.block.title, self.row.label, self.epsilon


def cells(
    table: Table, epsilons: Sequence[float] | None = None, methods: Sequence[str] | None = None
) -> list[Cell]:
    """Return the cells of ``table`` in its order, those of ``epsilons`` and ``methods`` only.

    An epsilon that the table does not have is added to every row that has a budget. Raises
    ValueError for a method that is not in the table, and where no cell is left.
    """
    known = sorted({row.method for block in table.blocks for row in block.rows})
    for method in methods or ():
        if method not in known:
            raise ValueError(f"methods: table {table.name} has {', '.join(known)}, got {method!r}")
    chosen = [cell for cell in _all(table, epsilons) if not methods or cell.row.method in methods]
    if not chosen:
        raise ValueError(f"epsilon, methods: no cell of table {table.name} has these together")
    return chosen


def _all(table: Table, epsilons: Sequence[float] | None) -> Iterator[Cell]:
    for block in table.blocks:
        for row in block.rows:
            if epsilons and None in row.printed:
                continue
            for epsilon in epsilons or row.printed:
                yield Cell(block, row, epsilon, row.figure(epsilon))


def in_running_order(wanted: Sequence[Cell], seeds: int) -> list[tuple[Cell, int]]:
    """Return what is trained, cell by seed: epsilon = 1 first, one seed of every method at a time.

    So an early end leaves the column that the papers compare at, and whole rows of it.
    """
    trained = [(cell, seed) for cell in wanted if cell.not_run is None for seed in range(seeds)]
    return sorted(trained, key=lambda trial: (_rank(trial[0].epsilon), trial[1]))


def first_epsilon(wanted: Sequence[Cell], block: Block) -> float | None:
    """Return the budget at which ``block`` is run first, None if it is not run with any."""
    run = [cell.epsilon for cell in wanted if cell.block is block and cell.not_run is None]
    return min((epsilon for epsilon in run if epsilon is not None), key=_rank, default=None)


def _rank(epsilon: Epsilon) -> tuple[int, float]:
    if epsilon is None:
        return 2, 0.0
    return (0, 0.0) if epsilon == 1.0 else (1, epsilon)
