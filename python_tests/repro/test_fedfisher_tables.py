"""FedFisher's tables: clients are trained once, and every method gets the same of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from dpkernels.cli import main
from dpkernels.federated import data as federated_data
from dpkernels.federated import models, networks
from dpkernels.federated.data import FederatedData
from dpkernels.federated.partitions import Partition, dirichlet
from dpkernels.fisher import Fisher, Kronecker
from dpkernels.repro.federated.fedfisher import (
    client_time,
    forms,
    methods,
    outcome,
    private,
    scene,
    sheets,
    training,
)
from dpkernels.repro.federated.fedfisher.scene import Merging, Scene
from dpkernels.repro.federated.fedfisher.uploads import Clients
from dpkernels.repro.federated.runs import Place, Run, algorithm_of, perform, settings

TRAINED, TESTED, CLASSES = 740, 60, 10
SMALL = Scene("fashion", "lenet", 0.5, local_epochs=2)
ALL = [row.merging for row in sheets.ROWS]


def _narrow_lenet():
    return torch.nn.Sequential(
        *models._pooled_convolutions(1, 3, 4), *models._linear_layers(64, 16, 12, CLASSES)
    )


def _images(records, seed):
    """Return noisy copies of one image for each class, the classes in turn."""
    drawn = torch.Generator().manual_seed(seed)
    y = torch.arange(records) % CLASSES
    kinds = torch.randn(CLASSES, 784, generator=torch.Generator().manual_seed(0))
    return kinds[y] + 0.5 * torch.randn(records, 784, generator=drawn), y


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Put a few images in the place of FashionMNIST, a narrow LeNet, a few steps for 2,000."""
    x, y = _images(TRAINED, 1)
    x_test, y_test = _images(TESTED, 2)
    tiny = FederatedData("fashion", x, y, x_test, y_test, CLASSES, (1, 28, 28), "tiny")
    monkeypatch.setitem(federated_data.DATASETS, "fashion", lambda data_dir: tiny)
    monkeypatch.setitem(networks.NETWORKS, "lenet", lambda data: _narrow_lenet())
    few = {
        "fedfisher": partial(methods._fedfisher, steps=4),
        "dense": partial(methods._dense, epochs=2, generator_steps=1, batch=8, latent=4),
    }
    for name, method in few.items():
        monkeypatch.setitem(methods.METHODS, name, method)
    caches = (scene._data, scene._parted)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def trainings(monkeypatch):
    """Return the scenes that were trained, in order."""
    seen = []
    train = training.train

    def counted(scene, start=None):
        seen.append(scene)
        return train(scene, start)

    monkeypatch.setattr(training, "train", counted)
    return seen


@pytest.fixture
def repro(tmp_path, monkeypatch):
    """Return the command on the few images, without CIFAR-10."""
    monkeypatch.setenv("DPKERNELS_DATA", str(tmp_path))

    def command(table, *more):
        words = ["--table", table, "--local-epochs", "1", "--cifar-seeds", "0"]
        folders = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
        return main(["repro", "fedfisher", *words, *folders, *more])

    return command


def cells_of(tmp_path, name):
    return json.loads((tmp_path / "out" / f"fedfisher_{name}.json").read_text())["cells"]


def rows_of(records):
    """Return records as a set: images are all different."""
    return {tuple(record.tolist()) for record in records}


def test_the_papers_figures_are_where_they_belong():
    cells = {
        (cell.row.label, cell.scenes[0].dataset, cell.column): cell.paper
        for cell in sheets.table2(sheets.Effort()).cells
    }
    assert cells["FedFisher(K-FAC)", "fashion", "alpha 0.1"] == 68.36
    assert cells["FedFisher(Diag)", "fashion", "alpha 0.05"] == 45.92
    assert cells["RegMean", "cifar10", "alpha 0.2"] == 43.41
    assert cells["FedAvg", "fashion", "alpha 0.1"] is None
    assert cells["ours, K-FAC", "fashion", "alpha 0.1"] is None
    by_size = {
        (cell.scenes[0].dataset, cell.row.label, cell.row.merging.form): cell.paper
        for sheet in (sheets.table4(sheets.Effort()), sheets.table5(sheets.Effort()))
        for cell in sheet.cells
    }
    assert by_size["fashion", "FedFisher(Diag)", "none"] == 54.64
    assert by_size["fashion", "FedFisher(K-FAC)", "paper"] == 68.96
    assert by_size["cifar10", "FedFisher(K-FAC)", "paper-6"] == 43.53
    assert by_size["fashion", "ours, K-FAC", "none"] is None


@pytest.mark.parametrize(
    ("alpha", "sizes"),
    [
        (0.2, [11342, 7179, 17385, 8292, 15802]),
        (0.1, [14962, 12151, 18845, 4849, 9193]),
        (0.05, [15722, 14865, 18007, 3383, 8023]),
    ],
)
def test_the_papers_partition_of_fashion_mnist(alpha, sizes):
    """6,000 records of each class, NumPy's seed 3; in which order they come does not matter."""
    labels = torch.arange(10).repeat(6000)
    assert dirichlet(labels, 5, alpha, scene.PAPERS_PARTITION).sizes.tolist() == sizes


def test_the_servers_records_are_in_no_client_and_nothing_else_is_missing():
    found, whole = scene.parted(SMALL), federated_data.load("fashion")
    clients = [found.data.x[found.parts.indices(client)] for client in range(5)]
    held = rows_of(found.x_validation)
    assert len(held) == scene.VALIDATION
    assert all(held.isdisjoint(rows_of(x)) for x in clients)
    assert sum(map(len, clients)) == TRAINED - scene.VALIDATION
    # Every client has what the paper's partition of all records gives it, but for those.
    papers = dirichlet(whole.y, 5, SMALL.alpha, scene.PAPERS_PARTITION)
    rescaled = scene._as_mnist(whole).x
    for client, x in enumerate(clients):
        assert rows_of(x) == rows_of(rescaled[papers.indices(client)]) - held


def test_pixels_of_fashion_mnist_are_scaled_as_the_authors_scale_them():
    whole = federated_data.load("fashion")
    pixels = whole.x * 0.3530 + 0.2860
    assert torch.allclose(scene._as_mnist(whole).x, (pixels - 0.1307) / 0.3081, atol=1e-6)
    assert scene.pixels_of("fashion") == ([0.1307], [0.3081])


def test_clients_are_trained_as_sgd_with_momentum_trains_them():
    trained = training.train(SMALL)
    records, problem = scene.parted(SMALL), training.problem_of(SMALL)
    client = max(range(5), key=lambda one: trained.sizes[one])
    x = records.images(records.data.x[records.parts.indices(client)])
    y = records.data.y[records.parts.indices(client)]
    model = problem.model
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    orders = torch.Generator().manual_seed(int(training.client_seeds(SMALL)[client]))
    for _ in range(SMALL.local_epochs):
        for rows in torch.randperm(len(y), generator=orders).split(64):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            sgd.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    moved = (expected - trained.start).norm()
    assert (trained.models[client] - expected).norm() < 1e-4 * moved


def test_client_models_are_kept_with_who_trained_them(tmp_path):
    trained = training.keep(training.train(SMALL), tmp_path)
    kept = training.read(SMALL, tmp_path)
    assert torch.equal(kept.models, trained.models) and kept.models.dtype == torch.float32
    assert kept.sizes == trained.sizes and sum(kept.sizes) == TRAINED - scene.VALIDATION
    assert {"commit", "cpu"} <= set(kept.origin) and kept.seconds > 0
    for other in (replace(SMALL, seed=1), replace(SMALL, alpha=0.2), replace(SMALL, validation=9)):
        assert training.read(other, tmp_path) is None


def test_seeds_differ_in_the_start_and_partitions_do_not():
    start = training.problem_of(SMALL).initial()
    assert torch.equal(training.problem_of(replace(SMALL, partition_seed=7)).initial(), start)
    assert not torch.equal(training.problem_of(replace(SMALL, seed=1)).initial(), start)


def test_an_outcome_does_not_depend_on_the_others(tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    outcome.perform(SMALL, ALL, together)
    for merging in (sheets.OUR_KRONECKER.merging, sheets.DENSE.merging, sheets.PFNM.merging):
        outcome.perform(SMALL, [merging], alone)
        one, other = (outcome.read(SMALL, merging, folder) for folder in (together, alone))
        assert one.accuracy == other.accuracy and one.scores == other.scores
        assert one.bytes_up == other.bytes_up


def test_uploads_cost_no_more_than_fedavgs_if_they_are_compressed_by_us(monkeypatch):
    monkeypatch.setitem(networks.NETWORKS, "lenet", lambda data: models.lenet(CLASSES))
    clients = Clients.of(training.train(SMALL))
    for row in (sheets.FEDAVG, sheets.KRONECKER, sheets.OUR_DIAGONAL, sheets.OUR_KRONECKER):
        uploads = clients.uploads(row.merging)
        assert uploads.fedavg_bytes == 4 * 44_190
        if row.merging.form == "symmetric" or row is sheets.KRONECKER:
            assert uploads.bytes <= uploads.fedavg_bytes
    assert clients.uploads(sheets.OUR_KRONECKER_WHOLE.merging).bytes > 3 * 4 * 44_190


def test_without_validation_records_nothing_is_chosen(tmp_path):
    outcome.perform(SMALL, [sheets.LAST.merging], tmp_path)
    found = outcome.read(SMALL, sheets.LAST.merging, tmp_path)
    assert found.scores == {} and found.chosen == found.iterations == 4


def test_no_method_minds_a_client_without_records(tmp_path, monkeypatch):
    def with_an_empty_one(labels, clients, alpha, seed):
        parts = dirichlet(labels, clients - 1, alpha, seed)
        others = [parts.indices(client) for client in range(clients - 1)]
        return Partition.of_parts([others[0], torch.empty(0, dtype=torch.int64), *others[1:]])

    monkeypatch.setattr(scene, "dirichlet", with_an_empty_one)
    one_each = replace(SMALL, clients=4, local_epochs=1)
    trained = training.train(one_each)
    assert trained.sizes[1] == 0 and trained.present == [0, 2, 3]
    assert torch.equal(trained.models[1], trained.start)
    outcome.perform(one_each, ALL, tmp_path)
    for merging in ALL:
        assert 0 <= outcome.read(one_each, merging, tmp_path).accuracy <= 100


def test_fedavg_is_the_mean_weighted_by_records():
    trained = training.train(SMALL)
    uploads = Clients.of(trained).uploads(Merging("fedavg"))
    network = methods.merged(uploads, Merging("fedavg")).network
    sizes = torch.tensor([float(size) for size in trained.sizes], dtype=torch.float64)
    expected = (sizes / sizes.sum()) @ trained.models.double()
    found = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert torch.allclose(found, expected.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "sheet", "more"),
    [
        ("2", "table2", ("--partitions", "1", "--methods", "fedavg", "fisher-merge")),
        ("4", "table4", ()),
        ("5", "table5", ()),
        ("clients", "clients", ("--clients", "2", "3", "--methods", "fedavg", "ot-fusion")),
    ],
)
def test_a_table_is_written_and_nothing_is_trained_twice(
    name, sheet, more, repro, tmp_path, trainings
):
    more = ("--seeds", "1", *more)
    assert repro(name, *more) == 0
    scenes = {"2": 6, "4": 1, "5": 1, "clients": 2}[name]
    assert len(trainings) == len(set(trainings)) == scenes
    first = cells_of(tmp_path, sheet)
    assert all(cell["mean"] is not None and cell["left_out"] is None for cell in first)
    text = (tmp_path / "out" / f"fedfisher_{sheet}.md").read_text()
    assert "1 epochs (the paper has 30)" in text
    assert (tmp_path / "out" / f"fedfisher_{sheet}.png").stat().st_size > 0
    assert repro(name, *more) == 0
    assert len(trainings) == scenes and cells_of(tmp_path, sheet) == first


def test_two_processes_find_what_one_does(repro, tmp_path):
    words = ("--seeds", "2", "--clients", "2", "--methods", "fedavg", "dense")
    assert repro("clients", *words) == 0
    alone = cells_of(tmp_path, "clients")
    assert repro("clients", *words, "--jobs", "2", "--runs", str(tmp_path / "others")) == 0
    together = cells_of(tmp_path, "clients")
    for one, other in zip(alone, together, strict=True):
        assert [s["accuracy"] for s in one["seeds"]] == [s["accuracy"] for s in other["seeds"]]
        assert [s["scores"] for s in one["seeds"]] == [s["scores"] for s in other["seeds"]]


def test_every_round_starts_from_what_the_last_one_was_merged_to(repro, tmp_path, trainings):
    chosen = ("fedavg", "dense")
    assert repro("few-shot", "--seeds", "1", "--methods", *chosen) == 0
    # The first round has nothing of the methods: its clients are trained for both.
    assert len(trainings) == 1 + 4 * len(chosen)
    folder, first = tmp_path / "runs", trainings[0]
    second = next(one for one in trainings if one.round == 2 and one.by.method == "fedavg")
    before, after = (training.read(one, folder) for one in (first, second))
    sizes = torch.tensor([float(size) for size in before.sizes], dtype=torch.float64)
    mean = (sizes / sizes.sum()) @ before.models.double()
    assert torch.allclose(after.start, mean.float(), rtol=1e-6, atol=1e-7)
    assert second.after(second.by).before() == second and second.before() == first
    assert not torch.equal(training.client_seeds(first), training.client_seeds(second))


def test_an_interrupted_table_goes_on(repro, tmp_path, trainings, monkeypatch, capsys):
    regmean = methods.METHODS["regmean"]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(methods.METHODS, "regmean", interrupted)
    some = ("--seeds", "1", "--partitions", "0", "--methods", "fedavg", "regmean")
    assert repro("2", *some) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(trainings) == 1 and not (tmp_path / "out").exists()
    monkeypatch.setitem(methods.METHODS, "regmean", regmean)
    assert repro("2", *some) == 0
    assert len(trainings) == 3


def test_a_method_that_is_not_there_is_left_out_with_a_reason(repro, tmp_path, monkeypatch):
    monkeypatch.setitem(methods._NEEDS, "pfnm", ("no_such_module",))
    assert repro("clients", "--seeds", "1", "--clients", "2", "--methods", "pfnm", "fedavg") == 0
    found = {cell["row"]: cell for cell in cells_of(tmp_path, "clients")}
    assert found["PFNM"]["mean"] is None and "no_such_module" in found["PFNM"]["left_out"]
    assert found["FedAvg"]["mean"] is not None
    text = (tmp_path / "out" / "fedfisher_clients.md").read_text()
    assert "Left out: PFNM" in text and "not run" in text


def test_client_time_is_of_all_parts(repro, tmp_path):
    found = client_time.measure(replace(SMALL, local_epochs=1), repeats=1)
    assert list(found.seconds) == [client_time.TRAINING, *client_time.FISHERS]
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert repro("1") == 0
    text = (tmp_path / "out" / "fedfisher_table1.md").read_text()
    assert "| local training | 14.5 |" in text and "+10.3%" in text


def _factor(size):
    """Return a matrix whose eigenvalues are all from 1 to 5."""
    columns = torch.randn(size, size) / size**0.5
    return torch.eye(size) + columns @ columns.T


def test_forms_of_an_upload_are_those_of_table_5():
    torch.manual_seed(0)
    state = {name: p.detach() for name, p in models.lenet(CLASSES).named_parameters()}
    shapes = {name: weight.flatten(1).shape for name, weight in state.items()}
    layers = {
        name: Kronecker(name, None, _factor(inputs), _factor(outputs))
        for name, (outputs, inputs) in shapes.items()
    }
    fisher = Fisher(layers, {}, 40)
    by_form = {form: forms.sent(state, fisher, form) for form in get_args(forms.Form)}
    (weights, whole), size = by_form["none"]
    assert all(torch.equal(weights[name], state[name]) for name in state) and whole is fisher
    assert size == 4 * (44_190 + sum(i**2 + o**2 for o, i in shapes.values()))
    for form in ("paper", "symmetric", "paper-2", "paper-6"):
        # The paper's own count is without 4 bytes for each scale and 28 for the header.
        assert by_form[form][1] <= 4 * 44_190 + 4 * (5 + 2 * 5 * 3) + 28
    # 16 d bits over 2 m + 2 m' + 2 numbers a layer: 1,752 in all, of 8, 16 and 5 bits.
    for form, rank in (("paper", 50), ("paper-2", 25), ("paper-6", 80)):
        widest = by_form[form][0][1].layers["7.weight"].a
        assert int(torch.linalg.matrix_rank(widest, rtol=1e-5)) == rank


def test_every_private_row_takes_its_settings_and_has_the_same_search():
    table = private.table()
    assert len({(cell.row.label, cell.epsilon) for cell in table.cells}) == 2 * len(private.ROWS)
    for cell in table.cells:
        assert cell.row.grid == private.ROWS[0].grid and cell.row.rounds == (1,)
        chosen = {**cell.row.fixed, "local_lr": 0.1, "local_steps": 300}
        run = Run(cell.place, cell.row.algorithm, settings(**chosen), 1, cell.epsilon, 0)
        assert algorithm_of(run).void is not None


@pytest.mark.parametrize("row", private.ROWS, ids=lambda row: row.label)
def test_private_rows_run_and_spend_the_budget(row):
    place = replace(private.PLACE, record_rate=0.25, partition="dirichlet:1")
    chosen = settings(**row.fixed, local_lr=0.1, local_steps=3)
    done = perform(Run(place, row.algorithm, chosen, 1, 8.0, 0))
    assert done.void is None and done.epsilon == pytest.approx(8.0, rel=0.05)
    assert 0 <= done.final <= 100


def test_runs_from_before_there_were_other_partitions_keep_their_names():
    run = Run(Place("digits", 5), "fedgd", settings(lr=1.0), 10, 8.0, 0)
    assert run.digest == "864924b3c24f367b19f0"
    assert replace(run, place=replace(run.place, partition_seed=3)).digest != run.digest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("9",), "fedfisher has 1, 2, 4, 5, few-shot"),
        (("2", "--clients", "5"), "the tables have 5"),
        (("2", "--rounds", "5"), "does not take it"),
        (("2", "--methods", "fedprox"), "got 'fedprox'"),
        (("1", "--jobs", "2"), "runs alone"),
        (("2", "--partitions", "-1"), "partitions must be an integer >= 0"),
    ],
)
def test_what_the_command_does_not_take(words, message, repro, capsys):
    assert repro(*words) == 2
    assert message in capsys.readouterr().err
