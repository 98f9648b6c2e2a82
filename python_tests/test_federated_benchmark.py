"""The federated benchmark: its forms compute the same round, and its tables say what was found."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.federated import __main__ as command
from benchmarks.federated import breakdown, compare, forms, growth, local, memory, ours
from benchmarks.federated.peers import cifar_ours, environments, measure, tasks
from benchmarks.federated.workload import Size, mean_loss, records_of
from benchmarks.timing import Budget, Spread

_SIZE = Size(6, 20, 5, 4)
_FEW = Budget(rounds=2)


@pytest.fixture(autouse=True)
def _keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("algorithm", ours.ALGORITHMS)
def test_every_form_of_a_round_gives_our_model(algorithm):
    x, labels = records_of(_SIZE)
    forms.check(algorithm, x, labels, _SIZE, ours.problem_of(x, labels, _SIZE.classes))


def test_a_form_that_gives_another_model_is_refused(monkeypatch):
    x, labels = records_of(_SIZE)
    problem = ours.problem_of(x, labels, _SIZE.classes)
    monkeypatch.setattr(forms, "loops", lambda algorithm: [forms.batched_form("FedSOFIM")])
    with pytest.raises(ValueError, match="must be ours"):
        forms.check("FedGD", x, labels, _SIZE, problem)


def test_records_can_be_learnt_and_about_half_are_clipped():
    x, labels = records_of(Size(50, 100, 16, 4))
    loop = forms.loops("FedGD")[0].make(x, labels, Size(50, 100, 16, 4), 0.0)
    before = mean_loss(x, labels, loop.server.theta)
    for _ in range(20):
        loop()
    assert mean_loss(x, labels, loop.server.theta) < 0.98 * before
    norms = torch.linalg.vector_norm(x, dim=2) * 0.75**0.5  # |p - e| of four equal classes
    assert 0.1 < (norms > ours.CLIP).double().mean() < 0.9


def test_noise_of_the_loop_has_our_deviation():
    x, labels = records_of(_SIZE)
    federation = ours.federation("FedGD", ours.problem_of(x, labels, _SIZE.classes), _SIZE)
    std = ours.client_std(federation)
    assert std > 0
    with_noise, without = (
        forms.loops("FedGD")[0].make(x, labels, _SIZE, s) for s in (100 * std, 0.0)
    )
    with_noise()
    without()
    moved = (with_noise.stacked - without.stacked).std().item()
    assert moved == pytest.approx(100 * std, rel=0.3)


@pytest.mark.parametrize("algorithm", ["FedSOFIM", "FedNew-cg"])
def test_comparison_names_the_forms_and_the_target(algorithm):
    found = compare.compare(algorithm, _SIZE, 1, _FEW)
    assert found.ratio.count == 2
    assert found.met == (found.ratio.median <= ours.TARGETS[algorithm])
    text = compare.table([asdict(found)])
    assert algorithm in text
    assert ("met" if found.met else "MISSED") in text


def test_breakdown_names_the_kernels_and_leaves_nothing_wrapped():
    before = ours.Federation.statement
    found = breakdown.breakdown("FedNew-cg", _SIZE, 1, 3)
    assert ours.Federation.statement is before
    assert {"kernel: conjugate gradients", "kernel: noise of all clients"} <= set(found.parts)
    assert all(milliseconds > 0 for milliseconds in found.parts.values())
    assert "kernel: conjugate gradients" in breakdown.table([asdict(found)])


def test_own_time_leaves_out_what_is_inside(monkeypatch):
    # The outer call begins at 0 and ends at 10; the inner one takes from 2 to 9.
    clock = iter([0.0, 2.0, 9.0, 10.0])
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: next(clock))
    watches = breakdown.Stopwatches()
    inner = watches.wrap("inner", lambda: None)
    watches.wrap("outer", lambda: inner())()
    assert dict(watches.seconds) == {"inner": 7.0, "outer": 3.0}


def test_growth_measures_every_form_and_draws_it(tmp_path):
    axis = growth.Axis("clients", (2, 4), lambda n: Size(n, 10, 4, 3))
    found = [asdict(p) for at in axis.sizes for p in growth.points(axis, at, 1, _FEW)]
    assert {one["form"] for one in found} >= set(ours.ALGORITHMS)
    growth.picture(found, tmp_path / "growth.png", "title")
    assert (tmp_path / "growth.png").stat().st_size > 0


def test_memory_is_held_to_the_larger_reading():
    found = memory.measure("FedNew-cg", Size(2, 10, 8, 3))
    text = memory.table([asdict(found)])
    assert ("met" if found.memory.at_most <= 300e6 else "MISSED") in text


def test_a_peer_without_an_environment_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path)
    with pytest.raises(RuntimeError, match="peers --prepare"):
        environments.run(environments.SETTINGS[0], _SIZE, 1, 1)


def test_peers_get_no_variable_of_ours_but_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path)
    monkeypatch.setenv("SOME_TOKEN", "secret")
    given = environments._surroundings(environments.PEERS["flwr"], 1)
    assert "SOME_TOKEN" not in given
    assert given["FLWR_TELEMETRY_ENABLED"] == "0"
    assert given["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_command_writes_results_that_can_be_shown_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command.memory, "SIZES", (Size(2, 10, 8, 3),))
    assert command.main(["memory", "--output", str(tmp_path), "--threads", "1"]) == 0
    text = (tmp_path / "federated_memory.md").read_text()
    assert "FedNew-exact" in text
    (tmp_path / "federated_memory.md").unlink()
    assert command.main(["memory", "--output", str(tmp_path), "--again"]) == 0
    assert (tmp_path / "federated_memory.md").read_text() == text


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_form_of_local_training_moves_parameters_alike(epochs):
    forms, plan = local.forms_of(local.Case(200, 4, 70, epochs))
    assert ("coefficients of at most 70" in plan) == (epochs > 1)
    assert len(forms) == (4 if epochs > 1 else 2)
    local.check(forms)
    with pytest.raises(ValueError, match="away from ours"):
        local.check(forms | {"none": lambda: torch.zeros_like(forms["ours"]())})


def test_local_training_is_timed_against_the_loop():
    found = asdict(local.compare(local.Case(200, 4, 70, 3), 1, _FEW))
    assert found["speedups"]["loop"]["median"] == 1.0
    assert "target 5x" in local.table([found])


def test_the_cnn_of_the_peers_has_the_published_size():
    task = tasks.task_of("cifar", tasks.CIFAR_SIZE)
    model = task.network()
    assert sum(p.numel() for p in model.parameters()) == 1_626_442
    assert "1,626,442" in command._WHAT["peers_cifar"]
    assert all(map(torch.equal, model.parameters(), task.network().parameters()))


def test_the_peers_images_need_their_shape():
    with pytest.raises(ValueError, match="3072 features"):
        tasks.task_of("cifar", _SIZE)


@pytest.mark.parametrize("noise", ["central", "local"])
def test_our_round_of_local_epochs_trains_and_adds_noise_where_it_says(noise):
    # The same round of a small network: two clients with twelve images, three steps each.
    task = tasks.task_of("cifar", Size(2, 12, 3072, 10))
    small = replace(task, batch=4, network=_small_network)
    quiet = cifar_ours.federation(small, noise, epsilon=None)
    before = quiet.problem.accuracy(quiet.server["theta"])
    for _ in range(5):
        quiet.round()
    assert quiet.problem.accuracy(quiet.server["theta"]) > before
    private = cifar_ours.federation(small, noise)
    assert private.release.central == (noise == "central")
    private.round()
    assert private.rounds_released == 1


def _small_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))


def test_peers_are_told_the_workload(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path)
    (tmp_path / "pfl").mkdir()
    (tmp_path / "pfl" / ".prepared").touch()
    asked = []

    def answered(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout='{"seconds": [1.0]}\n', stderr="")

    monkeypatch.setattr(environments.subprocess, "run", answered)
    setting = environments.CIFAR_SETTINGS[0]
    assert environments.run(setting, tasks.CIFAR_SIZE, 1, 1, "cifar") == {"seconds": [1.0]}
    told = asked[0]
    assert told[told.index("--workload") + 1] == "cifar"
    assert told[told.index("--noise") + 1] == "central"


def test_the_table_of_the_peers_is_in_multiples_of_our_first_row():
    spread = asdict(Spread.of([2.0, 2.0]))
    ours_row = {"name": f"{measure.OURS} --noise central", "milliseconds": spread}
    other = {"name": "pfl", "milliseconds": {name: 3 * x for name, x in spread.items()}}
    text = measure.table([row | {"does": "", "versions": {}} for row in (ours_row, other)])
    assert "| 1x |" in text and "| 3x |" in text
