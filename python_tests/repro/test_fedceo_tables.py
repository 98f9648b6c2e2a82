"""FedCEO's tables: noise of the paper in every view, rows that run, and what noise is worth."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpkernels.cli import main
from dpkernels.repro.federated import fedceo, fedceo_setting, noise_kept
from dpkernels.repro.federated.chosen import read_chosen
from dpkernels.repro.federated.dp_fedsofim import table as sofim
from dpkernels.repro.federated.fedceo_setting import CIFAR_IID, EMNIST, LENET, SIGMAS, Scale
from dpkernels.repro.federated.runs import (
    Place,
    Run,
    algorithm_of,
    federation_of,
    perform,
    settings,
)
from dpkernels.repro.federated.study import Row

SMALL = Scale(4, 1)
DIGITS = {"dataset": "digits", "clients": 20, "partition": "iid"}
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def run_of(place: Place, row: Row, sigma: float, **changed) -> Run:
    fixed = settings(**row.fixed)
    return Run(place, row.algorithm, fixed, row.rounds[0], None, 0, sigma=sigma, **changed)


@pytest.mark.parametrize("name", fedceo.TABLES)
def test_every_row_names_an_algorithm_with_settings_that_it_takes(name):
    for cell in fedceo.table(name, 6, 2).cells:
        for value in (0.01, 0.1):
            chosen = {**cell.row.fixed, **dict.fromkeys(cell.row.grid, value)}
            run = Run(cell.place, cell.row.algorithm, settings(**chosen), 6, 8.0, 0)
            assert algorithm_of(run).name == cell.row.algorithm


def test_the_papers_figures_are_where_they_belong():
    cells = fedceo.table("1").cells
    found = {
        (cell.place.dataset, cell.place.unit, cell.row.label, cell.sigma): cell.paper
        for cell in cells
    }
    assert found["emnist-letters", "user", "UDP-FedAvg", 2.0] == 60.32
    assert found["emnist-letters", "record", "FedCEO", 1.0] == 78.05
    assert found["cifar10", "user", "FedCEO", 1.5] == 50.0
    assert found["cifar10", "user", "ours", 1.5] is None
    assert found["cifar10", "user", "FedCEO, tau = 0", 1.0] is None


@pytest.mark.parametrize(
    "place",
    [
        fedceo_setting.user_level(EMNIST),
        fedceo_setting.in_turn(EMNIST),
        fedceo_setting.summed_only(EMNIST),
    ],
)
def test_the_sum_of_a_round_has_noise_sigma_c_in_every_view(place):
    small = replace(place, **DIGITS, sampling=place.sampling.split(":")[0] + ":10")
    if "poisson" in place.sampling:
        small = replace(small, sampling="poisson:0.5")
    row = fedceo._user_rows(EMNIST, 1.5, SMALL)[0]
    federation = federation_of(run_of(small, row, sigma=1.5))
    (stage,) = federation.stages
    std = federation.release.mean_std(stage, federation.multipliers[stage.name], 10)
    assert std == pytest.approx(1.5 / 10)


def test_dp_sgd_inside_the_clients_has_noise_sigma_c_in_every_step():
    small = replace(fedceo_setting.record_level(EMNIST), **DIGITS)
    row = fedceo._record_rows(EMNIST, 2.0, SMALL)[0]
    federation = federation_of(run_of(small, row, sigma=2.0))
    (stage,) = federation.stages
    per_record = federation.terms.records
    assert stage.releases == 8  # 506 records in batches of 64
    std = federation.release.client_std(stage, federation.multipliers[stage.name])
    assert std * per_record == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize("label", [row.label for row in fedceo._user_rows(EMNIST, 1.0, SMALL)])
def test_rows_at_user_level_run(label):
    row = next(r for r in fedceo._user_rows(EMNIST, 1.0, SMALL) if r.label == label)
    row = replace(row, fixed=dict(row.fixed) | ({"interval": 2} if "FedCEO" in label else {}))
    outcome = perform(
        run_of(replace(fedceo_setting.user_level(EMNIST), **DIGITS), row, 1.0, every=2)
    )
    assert set(outcome.accuracy) == {2, 4} and outcome.void is None


@pytest.mark.parametrize("label", [row.label for row in fedceo._record_rows(EMNIST, 1.0, SMALL)])
def test_rows_at_record_level_run(label):
    row = next(r for r in fedceo._record_rows(EMNIST, 1.0, SMALL) if r.label == label)
    outcome = perform(run_of(replace(fedceo_setting.record_level(EMNIST), **DIGITS), row, 1.0))
    assert outcome.void is None and 0 <= outcome.final <= 100


def test_no_threshold_is_no_threshold():
    """Tau = 0 leaves every client's own model as it is: its slices are what was uploaded."""
    row = next(r for r in fedceo._user_rows(EMNIST, 1.0, SMALL) if r.label == "FedCEO, tau = 0")
    row = replace(row, fixed=dict(row.fixed) | {"interval": 1}, rounds=(1,))
    place = replace(fedceo_setting.user_level(EMNIST), **DIGITS)
    plain = fedceo._user_rows(EMNIST, 1.0, SMALL)[0]
    folded, averaged = (
        federation_of(run_of(place, each, 1.0)) for each in (row, replace(plain, rounds=(1,)))
    )
    for federation in (folded, averaged):
        federation.round()
    assert torch.allclose(folded.server["theta"], averaged.server["theta"], atol=1e-6)
    assert len(folded.server["slices"]) == 10


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        # By Renyi divergences at T = 300; the last by exact composition is 747 / 364 / 223.
        (fedceo_setting.summed_only(EMNIST), (13.6, 6.9, 4.6)),
        (replace(fedceo_setting.user_level(EMNIST), view="aggregate"), (71.2, 28.1, 15.7)),
        (fedceo_setting.in_turn(EMNIST), (771.8, 374.9, 231.0)),
    ],
)
def test_what_the_papers_noise_is_worth(place, wanted):
    found = [fedceo_setting.epsilon_of(place, sigma, 300) for sigma in SIGMAS]
    assert found == [pytest.approx(value, abs=0.06) for value in wanted]


def test_whoever_sees_uploads_sees_who_took_part():
    """Drawn by chance, a client may be in every round: no amplification, and more than in turn."""
    drawn, in_turn = (
        fedceo_setting.epsilon_of(p, 2.0, 30)
        for p in (fedceo_setting.user_level(EMNIST), fedceo_setting.in_turn(EMNIST))
    )
    assert drawn > 3 * in_turn


def test_the_appendix_has_every_mechanism():
    text = fedceo_setting.guarantees(LENET, Scale(300, 30))
    assert text.count("| user, ") == 4 and "94 DP-SGD steps" in text and "| none |" in text


def test_settings_of_tables_before_networks_are_still_read():
    cells = sofim().cells
    chosen, note = read_chosen(RESULTS / "dp_fedsofim_table1.json", cells)
    assert len(chosen) == len(cells) and "earlier run" in note


def test_signal_and_noise_add_up_to_what_the_server_learnt():
    place = replace(fedceo_setting.user_level(CIFAR_IID), **DIGITS)
    run = Run(place, "udp-fedavg", settings(lr=0.5, local_epochs=1), 8, None, 0, sigma=1.5)
    algorithm = noise_kept.Watched(**dict(run.settings))
    federation = federation_of(run, algorithm)
    first = federation.model()
    signal, noise = noise_kept.parts(federation, algorithm, 0.5)
    assert torch.allclose(first + signal + noise, federation.model())
    expected = 0.5 * 1.5 / 10 * math.sqrt(8 * len(noise))
    assert float(noise.norm()) == pytest.approx(expected, rel=0.05)
    assert float(signal.norm()) <= 0.5 * 8
    found = noise_kept.watch(run)
    assert found.accuracy["1"] == pytest.approx(100 * federation.accuracy())
    assert found.noise_length == pytest.approx(float(noise.norm()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "9"], "fedceo has 1, 3, 5"),
        (["--rounds", "0", "--table", "5"], "rounds must be an integer >= 1"),
        (["--clients", "5", "--table", "5"], "fedceo has 100"),
    ],
)
def test_what_the_command_does_not_take(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPKERNELS_DATA", str(tmp_path))
    assert main(["repro", "fedceo", *words, "--runs", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_rounds_are_fedceos_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPKERNELS_DATA", str(tmp_path))
    assert main(["repro", "dp-fedsofim", "--rounds", "5", "--runs", str(tmp_path)]) == 2
    assert "dp-fedsofim's are fixed" in capsys.readouterr().err


def test_a_table_is_written_with_its_epsilons(tmp_path, monkeypatch):
    monkeypatch.setenv("DPKERNELS_DATA", str(tmp_path))
    place = replace(fedceo_setting.user_level(EMNIST), **DIGITS)
    rows = fedceo._user_rows(EMNIST, 1.0, SMALL)[:1]
    cells = tuple(fedceo.Cell(place, row, None, 50.0, 1.0) for row in rows)
    small = fedceo.Table("FedCEO", "5", "small", cells, 100, ("a note",), appendix="behind it\n")
    monkeypatch.setattr(fedceo, "table", lambda *_: small)
    words = ["repro", "fedceo", "--table", "5", "--seeds", "2", "--runs", str(tmp_path / "runs")]
    assert main([*words, "--output", str(tmp_path)]) == 0
    text = (tmp_path / "fedceo_table5.md").read_text()
    assert "| sigma 1 |" in text and "50.0 / **" in text and text.endswith("behind it\n")
    kept = json.loads((tmp_path / "fedceo_table5.json").read_text())
    assert kept["cells"][0]["sigma"] == 1.0 and len(kept["cells"][0]["seeds"]) == 2


def test_rows_at_equal_epsilon_stand_in_one_table_whatever_is_seen():
    cells = fedceo.table("epsilon").cells
    shown = {(cell.beside, cell.epsilon) for cell in cells}
    assert len(shown) == 8  # four data sets with their models, two budgets
    for place, epsilon in shown:
        here = [cell for cell in cells if (cell.beside, cell.epsilon) == (place, epsilon)]
        assert {cell.place.view for cell in here} == {"aggregate", "each_upload"}
        assert len({cell.row.label for cell in here}) == len(here)
