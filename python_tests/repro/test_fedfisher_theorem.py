"""The pieces of FedFisher's Theorem 1 against oracles, and the study that puts them together."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
import torch

from dpkernels.repro.federated import fedfisher_sweeps as sweeps
from dpkernels.repro.federated import fedfisher_theorem as theorem
from dpkernels.repro.federated import fedfisher_two_layer as network
from dpkernels.repro.federated.fedfisher_two_layer import Scene, Server, draw, features, outputs

EPS = torch.finfo(torch.float64).eps


def spread(seed: int, width: int, records: int = 3) -> Scene:
    """Inputs of two clients in turn on a half-circle, evenly: lambda_0 is far from 0.

    The first labels x with a quarter of its first coordinate, the second with one of its second.
    """
    scene = draw(seed, width, records=records)
    angles = torch.arange(2 * records, dtype=torch.float64) * math.pi / (2 * records) + 0.1
    inputs = torch.stack([angles.cos(), angles.sin()], -1)
    inputs = torch.stack([inputs[::2], inputs[1::2]])
    labels = torch.stack([inputs[0, :, 0], inputs[1, :, 1]]) / 4
    return Scene(inputs, labels, scene.weights, scene.signs)


def trained(scene: Scene, steps: int, rate: float = 0.1) -> torch.Tensor:
    """Clients' models by the fast descent."""
    clients = len(scene.inputs)
    weights = scene.weights.expand(clients, -1, -1)
    signs = scene.signs.expand(clients, -1)
    found = network.descend(weights, signs, scene.inputs, scene.labels, rate=rate, marks=[steps])
    return found[steps]


def fisher(scene: Scene, models: torch.Tensor) -> torch.Tensor:
    """F_i ``[M, d, d]``, dense, from the features."""
    rows = features(models, scene.signs, scene.inputs)
    return rows.mT @ rows / rows.shape[1]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_features_are_the_jacobian_of_the_outputs():
    scene = draw(0, 12, records=9)
    for inputs in scene.inputs:
        jacobian = torch.func.jacrev(outputs)(scene.weights, scene.signs, inputs).flatten(1)
        torch.testing.assert_close(features(scene.weights, scene.signs, inputs), jacobian)


def test_fisher_is_the_expectation_of_squared_scores_under_the_model():
    """E over y ~ N(f, 1): scores (y - f) phi at the two points of Gauss and Hermite are exact."""
    scene = draw(1, 6, records=5)
    inputs = scene.inputs[0]
    f = outputs(scene.weights, scene.signs, inputs)
    total = torch.zeros(12, 12, dtype=torch.float64)
    for j, x in enumerate(inputs):
        for label in (f[j] - 1, f[j] + 1):
            weights = scene.weights.clone().requires_grad_()
            half = 0.5 * (outputs(weights, scene.signs, x[None])[0] - label) ** 2
            (score,) = torch.autograd.grad(half, weights)
            total += torch.outer(score.flatten(), score.flatten()) / (2 * len(inputs))
    torch.testing.assert_close(fisher(scene, scene.weights.expand(2, -1, -1))[0], total)


def test_the_network_is_homogeneous_so_that_targets_are_predictions():
    scene = draw(2, 33)
    models = torch.stack([scene.weights, 3 * scene.weights])
    linear = features(models, scene.signs, scene.inputs) @ models.flatten(1)[..., None]
    torch.testing.assert_close(linear[..., 0], outputs(models, scene.signs, scene.inputs))


@pytest.mark.parametrize("width", [1, 7, 64])
def test_descent_by_arcs_is_descent_by_autograd(width):
    scene = draw(3, width, records=20)
    steps, rate = 60, 0.5
    for client, model in enumerate(trained(scene, steps, rate)):
        inputs, labels = scene.inputs[client], scene.labels[client]
        weights = scene.weights.clone()
        for _ in range(steps):
            weights.requires_grad_()
            half = 0.5 * (outputs(weights, scene.signs, inputs) - labels).square().mean()
            (gradient,) = torch.autograd.grad(half, weights)
            weights = weights.detach() - rate * gradient
        # Rounding grows with the number of additions: steps times records, and neurons.
        assert relative(model, weights) < EPS * steps * (20 + width)


def test_descent_leaves_its_start_alone_and_gives_every_mark():
    scene = draw(4, 16)
    weights = scene.weights.expand(2, -1, -1).clone()
    before = weights.clone()
    signs = scene.signs.expand(2, -1)
    data = (scene.inputs, scene.labels)
    found = network.descend(weights, signs, *data, rate=0.1, marks=(5, 9))
    assert torch.equal(weights, before)
    on = network.descend(found[5], signs, *data, rate=0.1, marks=(4,))[4]
    assert relative(on, found[9]) < EPS * 9 * 116


def test_the_limit_is_the_dense_projection_of_the_mean_onto_the_solutions():
    """W* = mean + F^+ (sum F_i W_i - F mean), F = sum F_i: (7) in closed form."""
    scene = spread(0, 40)
    models = trained(scene, 300)
    server = Server.of(models, scene.signs, scene.inputs)
    each = fisher(scene, models)
    total = each.sum(0)
    right = (each @ models.flatten(1)[..., None]).sum(0)[:, 0]
    start = models.mean(0).flatten()
    values = torch.linalg.eigvalsh(total)
    rank = int((values > 80 * EPS * values[-1]).sum())
    assert rank == len(server.values) == 6
    dense = start + torch.linalg.pinv(total, hermitian=True) @ (right - total @ start)
    condition = float(values[-1] / values[-rank])
    limit = server.limit().flatten()
    assert relative(limit, dense) < 80 * EPS * condition
    # A solution (Proposition 2), and no part of its way from the mean lies in the null space.
    assert float((total @ limit - right).norm()) < 80 * EPS * condition * float(right.norm())
    null = torch.linalg.eigh(total).eigenvectors[:, :-rank]
    away = limit - start
    assert float((null.T @ away).norm()) < 80 * EPS * condition * float(away.norm())


def test_iterates_are_those_of_gradient_descent_and_tend_to_the_limit():
    scene = spread(1, 24)
    models = trained(scene, 100)
    server = Server.of(models, scene.signs, scene.inputs)
    each = fisher(scene, models)
    total = each.sum(0)
    right = (each @ models.flatten(1)[..., None]).sum(0)[:, 0]
    assert server.largest == pytest.approx(float(torch.linalg.eigvalsh(total)[-1]), rel=1e-12)
    rate = 1 / server.largest
    weights, distances = models.mean(0).flatten(), []
    for step in range(1, 4001):
        weights = weights - rate * (total @ weights - right)
        if step in (1, 10, 500, 4000):
            iterate = server.after(step, rate).flatten()
            assert relative(weights, iterate) < EPS * 48 * step
            distances.append(float((weights - server.limit().flatten()).norm()))
    least = float(server.values[-1]) ** 2
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] <= distances[0] * (1 - rate * least) ** 3999 * (1 + 1e-9) + 1e-12


def test_a_server_rate_beyond_lemma_1_is_refused():
    scene = spread(1, 24)
    server = Server.of(trained(scene, 10), scene.signs, scene.inputs)
    with pytest.raises(ValueError, match=r"after: rate must be at most 1 / largest = .*, got"):
        server.after(10, 1.01 / server.largest)


def test_equal_models_are_where_the_server_stays():
    scene = draw(5, 30)
    models = trained(scene, 50)[:1].expand(2, -1, -1)
    limit = Server.of(models, scene.signs, scene.inputs).limit()
    away = (limit - models[0]).norm()
    # What rounding leaves of the targets is divided by the least singular value.
    least = float(Server.of(models, scene.signs, scene.inputs).values[-1])
    assert float(away) < 200 * EPS / least


def test_neurons_come_together_and_the_linear_model_holds_as_width_grows():
    """The furthest neuron is O(m^-1/2) away (Lemma 6), and W* misses its linear form by O(1/m)."""
    ways, gaps = [], []
    for seed in range(16):
        far, missed = [], []
        for width in (256, 4096):
            scene = spread(seed, width)
            models = trained(scene, 60, 1.0)
            limit = Server.of(models, scene.signs, scene.inputs).limit()
            far.append(float((models - limit).norm(dim=-1).max()))
            own = outputs(models, scene.signs, scene.inputs)
            linear = features(models, scene.signs, scene.inputs) @ limit.flatten()
            torch.testing.assert_close(linear, own)
            gap = outputs(limit, scene.signs, scene.inputs) - own
            missed.append(float(gap.square().mean()))
        ways.append(math.log(far[1] / far[0]) / math.log(16))
        gaps.append(math.log(missed[1] / missed[0]) / math.log(16))
    for slopes, expected in ((ways, -0.5), (gaps, -1.0)):
        error = statistics.stdev(slopes) / math.sqrt(len(slopes))
        assert error < 0.15
        assert abs(statistics.mean(slopes) - expected) < 3 * error


def test_lambda_0_is_the_expectation_of_definition_1():
    inputs = spread(0, 1).inputs
    rows = inputs.reshape(-1, 2)
    # Over the angle of w, by the midpoint rule: but for cells where x . w changes sign.
    count = 200_000
    angles = (torch.arange(count, dtype=torch.float64) + 0.5) * 2 * math.pi / count
    active = (rows @ torch.stack([angles.cos(), angles.sin()]) >= 0).double()
    kernel = (rows @ rows.T) * (active @ active.T) / count
    expected = float(torch.linalg.eigvalsh(kernel)[0])
    assert network.least_eigenvalue(inputs) == pytest.approx(expected, abs=len(rows) * 2 / count)


def test_data_are_those_of_appendix_d():
    scene, wider = draw(6, 8), draw(6, 32)
    assert scene.inputs.shape == (2, 100, 2) and scene.labels.shape == (2, 100)
    torch.testing.assert_close(scene.inputs.norm(dim=-1), torch.ones(2, 100, dtype=torch.float64))
    assert torch.equal(scene.inputs, wider.inputs) and torch.equal(scene.labels, wider.labels)
    assert set(wider.signs.tolist()) == {-1.0, 1.0}
    slopes = [
        torch.linalg.lstsq(x, y).solution for x, y in zip(scene.inputs, scene.labels, strict=True)
    ]
    torch.testing.assert_close((scene.inputs[0] @ slopes[0]), scene.labels[0])
    assert float((slopes[0] - slopes[1]).norm()) > 0.1
    shared = draw(6, 8, shared=True)
    assert torch.equal(shared.inputs, scene.inputs)
    assert torch.equal(shared.labels[0], scene.labels[0])
    torch.testing.assert_close(shared.labels[1], scene.inputs[1] @ slopes[0])
    weights = draw(6, 20_000).weights
    assert float(weights.var()) == pytest.approx(0.5, abs=5 * 0.5 * math.sqrt(2 / 40_000))


def test_measured_figures_are_what_their_names_say():
    scene = spread(2, 64)
    models = trained(scene, 200)
    found = sweeps.measure(scene, models)
    server = Server.of(models, scene.signs, scene.inputs)
    each = [
        network.loss(w[None], Scene(x[None], y[None], scene.weights, scene.signs))
        for w, x, y in zip(models, scene.inputs, scene.labels, strict=True)
    ]
    assert found["local"] == pytest.approx(sum(each) / 2)
    assert found["fedavg"] == network.loss((models[0] + models[1]) / 2, scene)
    assert found["limit"] == network.loss(server.limit(), scene)
    # All features are independent here: the linear models keep what the clients learnt.
    assert found["linear"] == pytest.approx(found["local"], rel=1e-9)
    slowest = server.after(round(found["patience"]), sweeps.SERVER_RATE) - server.limit()
    along = float(server.directions[-1] @ slowest.flatten())
    start = float(server.misses[-1] / server.values[-1])
    assert along == pytest.approx(-start / math.e, rel=1e-2)
    assert found["apart"] == float((models[0] - models[1]).norm(dim=1).max())
    assert found["apart"] <= 2 * found["moved"]


def test_a_study_is_written_resumed_and_can_be_repeated(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    small = sweeps.Scale(seeds=2, widths=(8, 16), steps=(1, 4), at_width=16, at_steps=4)
    files = theorem.conduct(tmp_path, small)
    assert [file.name for file in files] == [
        f"fedfisher_theorem.{e}" for e in ("json", "md", "png")
    ]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    text = files[0].read_text()
    content = json.loads(text)
    assert len(content["sweeps"]) == 5 and len(content["lambda_0"]) == 2
    for one in content["sweeps"]:
        for cell in one["cells"]:
            assert all(len(values) == 2 for values in cell["values"].values())
    table = files[1].read_text()
    for one in theorem.load(files[0]):
        assert statistics.median(one.cells[0].values["fedavg"]) > 0
        assert f"{statistics.median(one.cells[0].values['fedavg']):.2g}" in table

    def never(sweep):
        raise AssertionError(f"{sweep} ran again")

    monkeypatch.setattr(theorem, "run", never)
    theorem.conduct(tmp_path, small)
    assert files[0].read_text() == text
    with pytest.raises(AssertionError, match="ran again"):
        theorem.conduct(tmp_path, replace(small, seeds=1))


def test_seeds_do_not_depend_on_how_many_are_trained_at_once(monkeypatch):
    sweep = sweeps.Sweep((8,), (30,), joint=True, seeds=3)
    together = sweeps.run(sweep)[0].values
    monkeypatch.setattr(sweeps, "_TOGETHER", 1)
    alone = sweeps.run(sweep)[0].values
    for name in ("local", "fedavg", "joint", "moved"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
