"""What the paper printed, and in which order it is run."""

from __future__ import annotations

import re

import pytest

from dpkernels.repro.dp_kfc import PLAIN, TABLES
from dpkernels.repro.search import SEARCH
from dpkernels.repro.tables import Block, Cell, Row, cells, in_running_order
from dpkernels.repro.trials import folder_of, options_of
from dpkernels.repro.tuned import ALL_TABLES, DP_SGD, TUNED
from dpkernels.train.methods import METHODS
from dpkernels.train.options import filled_in

EPSILONS = (0.5, 1, 2, 3, 5, 8)
# A second copy, typed from notes on the paper; None where they have nothing.
MNIST = {
    "dp-sgd": (90.8, 91.7, 92.5, 92.9, 93.4, 93.7),
    "adadps": (None, 91.3, 93.2, None, 93.6, 93.3),
    "disk": (None, 93.7, 94.1, None, 94.3, 94.3),
    "dp-adambc": (None, 94.0, 94.8, None, 95.2, 95.3),
    "dp-kfc": (93.3, 94.2, 95.0, 95.3, 95.7, 95.9),
    "dp-kfc-public": (94.7, 95.3, 95.7, 96.0, 96.2, 96.4),
    "dp-kfc+adambc": (None, 95.5, 96.1, None, 96.4, 96.4),
}
FASHION = {"dp-sgd": 83.5, "dp-kfc-public": 87.6, "dp-kfc": 87.8, "dp-kfc-oracle": 88.3}
IMDB = {("dp-sgd", 1): 82.9, ("dp-sgd", 8): 83.2, ("dp-kfc", 1): 85.1, ("dp-kfc", 8): 86.0}


def means(number, title):
    """Return what table ``number`` has for a data set, by method and epsilon."""
    return {
        (cell.row.method, cell.epsilon): cell.printed.mean
        for cell in cells(TABLES[number])
        if cell.block.title.startswith(title) and cell.printed is not None
    }


@pytest.mark.parametrize("number", [1, 5, 6])
def test_mnist_is_as_in_the_second_copy(number):
    copy = {
        (method, epsilon): mean
        for method, row in MNIST.items()
        for epsilon, mean in zip(EPSILONS, row, strict=True)
        if mean is not None
    }
    found = means(str(number), "MNIST")
    both = found.keys() & copy.keys()
    assert len(both) == {1: 21, 5: 18, 6: 28}[number]
    assert {key: found[key] for key in both} == {key: copy[key] for key in both}


def test_the_other_data_sets_are_as_in_the_second_copy():
    fashion, imdb = means("2", "FashionMNIST"), means("5", "IMDB")
    assert {method: fashion[method, 1.0] for method in FASHION} == FASHION
    # The notes have one row of AdaDPS, the public one.
    assert fashion["adadps-public", 1.0] == 84.7
    assert {key: imdb[key] for key in IMDB} == IMDB
    assert means("7", "MNIST")["dp-kfc", 2.0] == 97.1


def test_every_cell_that_is_run_has_options_and_a_folder_of_its_own(tmp_path):
    for table in ALL_TABLES.values():
        runnable = [cell for cell in cells(table) if cell.not_run is None]
        chosen = [options_of(cell, seed, {}) for cell in runnable for seed in (0, 1)]
        assert len({folder_of(tmp_path, options) for options in chosen}) == len(chosen) > 0
        for cell in runnable if table is not TUNED else ():
            options = options_of(cell, 0, {})
            assert options.accountant == "rdp" and options.delta == 1e-5 and options.clip == 1
            assert cell.epsilon in (options.epsilon, None)
            # What has no epsilon in the table is what is trained without noise.
            assert (cell.epsilon is None) == (METHODS[options.method].not_private is not None)


@pytest.mark.parametrize("number", TABLES)
def test_a_table_has_rates_of_its_rows_own_where_its_notes_say_what_they_were_chosen_on(number):
    table = TABLES[number]
    own = any("lr" in row.settings for block in table.blocks for row in block.rows)
    notes = [n for n in table.notes if re.search("rate.*training images.*were left out", n, re.I)]
    assert bool(notes) is own
    assert (any(n.endswith("tuned here for the other rows.") for n in table.notes) and own) is False


def test_cells_that_tables_share_are_trained_once(tmp_path):
    folders = {}
    for number in ("1", "5", "6"):
        for cell in cells(TABLES[number], [2.0], ["dp-kfc"]):
            if cell.not_run is None and cell.block.title.startswith("MNIST"):
                options = options_of(cell, 0, {})
                folders.setdefault(folder_of(tmp_path, options), []).append(options)
    # With the paper's factors, and with our own.
    assert len(folders) == 2
    for trained in folders.values():
        assert len(trained) == 3 and trained[0] == trained[1] == trained[2]


def test_trainings_with_other_settings_have_other_folders(tmp_path):
    def folder(method="dp-sgd", changed=None, **own):
        cell = Cell(
            Block("MNIST", (), PLAIN["mnist"]), Row("", method, {}, settings=own), 2.0, None
        )
        return folder_of(tmp_path, options_of(cell, 0, changed or {}))

    plain = tmp_path / "mnist-cnn" / "dp-sgd" / "eps-2" / "seed-0"
    assert folder() == folder(lr=1e-3) == folder(changed={"data_dir": "moved"}) == plain
    others = [folder(lr=1e-2), folder(clip=0.5), folder(lr=1e-2, clip=0.5), folder(epochs=6)]
    assert len({plain, *others}) == 5
    # What is shown in the path is not in the digest, so that it is the same for every budget.
    assert {path.parent.parent.parent for path in others} == {tmp_path / "mnist-cnn"}
    assert folder(changed={"lr": 1e-2}) == others[0]
    # A method that is an optimizer itself has no optimizer in its settings to differ in.
    assert folder("dp-adambc").parent.parent.name == "dp-adambc"


def test_settings_of_a_row_are_over_the_block_s_and_under_the_command_s():
    row = Row("DP-SGD", "dp-sgd", {}, settings={"lr": 0.5, "epochs": 7})
    cell = Cell(Block("MNIST", (row,), PLAIN["mnist"]), row, 2.0, None)
    options = options_of(cell, 3, {"epochs": 1})
    assert (options.lr, options.epochs, options.seed, options.clip) == (0.5, 1, 3, 1.0)


def test_epsilon_one_comes_first_and_every_method_before_the_next_seed():
    trials = in_running_order(cells(TABLES["1"], methods=["dp-sgd", "disk"]), seeds=2)
    order = [(cell.epsilon, seed, cell.row.method) for cell, seed in trials]
    pairs = [(epsilon, seed) for epsilon in (1.0, 2.0, 8.0) for seed in (0, 1)]
    assert order == [(*pair, method) for pair in pairs for method in ("dp-sgd", "disk")]


def test_what_is_not_run_is_not_in_the_order_and_what_has_no_budget_is_last():
    trials = in_running_order(cells(TABLES["5"]), seeds=1)
    titles = {cell.block.title for cell, _ in trials}
    assert titles == {"MNIST, CNN", "IMDB, logistic regression"}
    assert [cell.epsilon for cell, _ in trials][-2:] == [None, None]
    assert [cell.epsilon for cell, _ in trials][:8] == [1.0] * 8


def test_an_epsilon_that_the_paper_lacks_has_nothing_printed():
    (cell,) = cells(TABLES["1"], [0.25], ["dp-sgd"])
    assert cell.epsilon == 0.25 and cell.printed is None


def test_every_row_of_mnist_has_all_budgets_with_the_figures_of_any_table():
    shown = {
        (cell.row.method, cell.epsilon): cell.printed
        for cell in cells(TABLES["6"], list(EPSILONS))
        if not cell.row.label.endswith("by default")
    }
    assert {
        method: tuple(shown[method, e] and shown[method, e].mean for e in EPSILONS)
        for method in MNIST
    } == MNIST
    assert shown["dp-kfc", 3].source == "Table 5" and shown["dp-kfc", 1].source is None
    # What Table 1 abridges is Table 6's.
    (five,) = cells(TABLES["1"], [5.0], ["disk"])
    assert five.printed.mean == 94.3 and five.printed.source == "Table 6"
    # The tables' own budgets stay theirs.
    assert {cell.epsilon for cell in cells(TABLES["6"])} == {1, 2, 5, 8}


def test_factors_by_default_are_those_of_the_command_and_the_paper_s_are_its_own():
    for number, table in TABLES.items():
        for cell in cells(table):
            if cell.not_run is not None or "dp-kfc" not in cell.row.method:
                continue
            options = options_of(cell, 0, {})
            factors = options.sides, options.normalise, options.damping, options.power
            if cell.row.label.endswith("by default"):
                given = {"dataset": options.dataset, "model": options.model, "method": "dp-kfc"}
                own = filled_in(given)
                assert factors == (own.sides, own.normalise, own.damping, own.power)
                assert cell.printed is None
                continue
            assert (options.refresh_every, options.probe_batches) == (50, 8)
            images = options.dataset != "imdb" and cell.row.method in ("dp-kfc", "dp-kfc+adambc")
            damping = 0.1 if number == "2" and cell.printed else 1e-3
            assert factors == ("AG", "none", damping, 2.0 if images else None)


@pytest.mark.parametrize("number", TABLES)
def test_a_table_says_what_its_defaults_were_chosen_on_and_that_epsilon_is_without_it(number):
    table = TABLES[number]
    rows = [row for block in table.blocks for row in block.rows]
    assert any(row.label.endswith("by default") for row in rows)
    assert any(note.startswith("Rows with factors as here by default") for note in table.notes)
    assert "What was chosen on training records is not in epsilon." in table.notes


def test_what_is_searched_is_measured_on_what_was_left_out_and_nothing_else_is():
    for table in ALL_TABLES.values():
        for cell in cells(table):
            if cell.not_run is None:
                held_out = options_of(cell, 0, {}).validation
                texts = cell.block.settings["dataset"] == "imdb"
                assert held_out == ((5_000 if texts else 10_000) if table is SEARCH else None)
    assert all(cell.epsilon == 1 and cell.printed is None for cell in cells(SEARCH))


@pytest.mark.parametrize("dataset", ["mnist", "fashion"])
def test_the_tuned_table_has_the_defaults_of_the_command(dataset):
    tuned = [c for c in cells(TUNED, [2.0]) if c.block.settings["dataset"] == dataset]
    for cell in tuned:
        given = {"dataset": dataset, "method": cell.row.method, "epsilon": 2.0, "seed": 0}
        if cell.row.method == "dp-sgd":
            given |= DP_SGD  # the best for it, in the table search
        assert options_of(cell, 0, {}) == filled_in(given)
    assert [cell.row.method for cell in tuned] == ["dp-sgd", "dp-kfc"]


def test_the_tuned_table_is_held_to_the_paper_s_best_with_a_guarantee():
    rivals = {
        (cell.block.title, cell.row.method, cell.epsilon): cell.printed and cell.printed.mean
        for cell in cells(TUNED, [1.0, 2.0, 8.0])
    }
    assert rivals == {
        ("MNIST", "dp-sgd", 1): 91.7,
        ("MNIST", "dp-sgd", 2): 94.2,
        ("MNIST", "dp-sgd", 8): 93.7,
        ("MNIST", "dp-kfc", 1): 95.5,
        ("MNIST", "dp-kfc", 2): 97.1,
        ("MNIST", "dp-kfc", 8): 96.4,
        ("FashionMNIST", "dp-sgd", 1): 83.5,
        ("FashionMNIST", "dp-sgd", 2): 84.3,
        ("FashionMNIST", "dp-sgd", 8): None,
        # Not the oracle's 88.3, which has seen the private data.
        ("FashionMNIST", "dp-kfc", 1): 87.8,
        ("FashionMNIST", "dp-kfc", 2): 87.1,
        ("FashionMNIST", "dp-kfc", 8): None,
    }
