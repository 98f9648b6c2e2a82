"""Federated tables: chosen on held-out records, kept, and shown with what is guaranteed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dpkernels.cli import main
from dpkernels.repro import provenance
from dpkernels.repro.federated import dp_fednew, dp_fedsofim, report, runs, study
from dpkernels.repro.federated.chosen import read_chosen
from dpkernels.repro.federated.runs import Place, Run, settings
from dpkernels.repro.federated.study import Cell, Row, conduct

PLACE = Place("digits", 10, delta=1e-4)
GD = Row("plain", "fedgd", {"lr": (0.001, 0.3)}, {"clip": 1.0}, rounds=(12,))
SAME = Row(
    "taken over", "fedgd", fixed={"clip": 2.0}, like="plain", transfer=lambda x: {"lr": x["lr"]}
)
VOID = Row("void", "fednew", fixed={"rescale": "xi", "hessian": "none"}, rounds=(4,))


@pytest.fixture
def results(tmp_path):
    cells = [Cell(PLACE, GD, 4.0, paper=50.0), Cell(PLACE, SAME, 4.0), Cell(PLACE, VOID, 4.0)]
    found = conduct(cells, folder=tmp_path, validation=300, seeds=2, report=lambda text: None)
    return found, cells, tmp_path


def test_settings_are_chosen_on_held_out_records_and_reported_on_others(results):
    (plain, *_), _, folder = results
    assert dict(plain.chosen.algorithm) == {"lr": 0.3, "clip": 1.0}
    kept = [json.loads(file.read_text())["run"] for file in folder.glob("*.json")]
    chose = [run for run in kept if run["validation"] == 300]
    told = [run for run in kept if run["validation"] == 0]
    assert len(chose) + len(told) == len(kept)
    assert not {run["seed"] for run in chose} & {run["seed"] for run in told}
    assert all(dict(run["settings"])["lr"] == 0.3 for run in told if run["algorithm"] == "fedgd")


def test_a_row_takes_over_what_another_chose(results):
    found, *_ = results
    assert dict(found[1].chosen.algorithm) == {"lr": 0.3, "clip": 2.0}


def test_what_was_kept_is_not_run_again(results, monkeypatch):
    found, cells, folder = results

    def no_run(run):
        raise AssertionError("ran again")

    monkeypatch.setattr(runs, "perform", no_run)
    again = conduct(cells, folder=folder, validation=300, seeds=2, report=lambda text: None)
    assert [r.mean for r in again] == [r.mean for r in found]


def test_the_same_run_gives_the_same_result():
    run = Run(PLACE, "fedgd", settings(lr=0.3, clip=1.0), 5, 2.0, seed=3)
    assert runs.perform(run).accuracy == runs.perform(run).accuracy


def test_the_page_names_the_guarantee_and_keeps_to_the_budget(results):
    found, *_ = results
    where = {"commit": "abc", "cpu": "some", "time": "now"}
    page = report.markdown("title", ["a note"], found, where)
    assert "50.0 / **" in page
    assert "**none**: rescale='xi'" in page
    assert found[0].outcomes[0].epsilon <= 4.0
    assert found[2].outcomes[0].epsilon is None
    assert found[2].outcomes[0].claimed <= 4.0


@pytest.mark.parametrize("name", dp_fednew.TABLES)
def test_every_cell_of_fednews_tables_makes_its_algorithm(name):
    for cell in dp_fednew.TABLES[name]().cells:
        for run in study.candidates(cell, 10):
            runs.algorithm_of(run)


def test_the_papers_figures_stand_beside_their_rows():
    cells = dp_fedsofim.table().cells
    printed = {(c.row.label, c.epsilon): c.paper for c in cells if c.paper is not None}
    assert printed["DP-FedSOFIM", 0.5] == 61.03
    assert printed["DP-FedGD", None] == 66.41
    assert len(printed) == 12
    adult = {(c.row.label, c.place.clients, c.epsilon): c.paper for c in dp_fednew.table8().cells}
    assert adult["DP-FedFC", 500, 10.0] == 84.2
    assert adult["DP-FedNew, the paper's steps", 500, 1.0] == 83.4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dp-fednew", "--table", "9"], "table: dp-fednew has 8, 5"),
        (["dp-fedsofim", "--clients", "5"], "clients: dp-fedsofim has 20"),
        (["dp-fednew", "--methods", "dp-sgd"], "methods: dp-fednew does not take it"),
        (["dp-kfc"], "table: name one"),
        (["dp-fednew", "--table", "8", "--epsilon", "3"], "epsilon: table 8 has none"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DPKERNELS_DATA", str(tmp_path))
    assert main(["repro", *words]) == 2
    assert said in capsys.readouterr().err


def test_cells_are_run_again_with_the_settings_that_were_chosen(results, tmp_path, monkeypatch):
    found, cells, _ = results
    where = provenance.collect()
    file = tmp_path / "table.json"
    file.write_text(json.dumps(report.to_dict("title", (), found, where, "command")))
    chosen, note = read_chosen(file, cells)
    assert where["time"] in note
    monkeypatch.setattr(study, "choose", None)  # nothing is chosen
    again = conduct(
        cells,
        folder=tmp_path / "again",
        validation=300,
        seeds=2,
        chosen=chosen,
        report=lambda text: None,
    )
    assert [r.chosen for r in again] == [r.chosen for r in found]
    assert [r.mean for r in again] == [r.mean for r in found]
    with pytest.raises(ValueError, match="has no settings for"):
        read_chosen(file, [dataclasses.replace(cells[0], epsilon=77.0)])
