"""Any model: clipped sums are those of single samples, and private training learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from dpkernels.engine import Unsupported
from dpkernels.federated import FedFC, FedGD, FedNew, FedSOFIM, ModelProblem
from python_tests.federated.cases import federation, finish, terms, watched

digits = pytest.importorskip("sklearn.datasets")


def small_cnn(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(128, 10),
    ).to(dtype)


def images(dtype=torch.float32):
    data = digits.load_digits()
    x = torch.tensor(data.images, dtype=dtype).unsqueeze(1) / 16
    return x, torch.tensor(data.target)


def problem_of(counts, *, dtype=torch.float32, model=None, **options):
    x, y = images(dtype)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = list(order.split([*counts, len(x) - sum(counts)]))
    test = parts.pop()[:400]
    model = small_cnn(dtype) if model is None else model
    return ModelProblem(model, x, y, parts, x[test], y[test], **options)


def single_gradients(problem, rows):
    """Return every record's gradient by autograd, ``[n, D]``."""
    found = []
    for row in rows.tolist():
        part = slice(row, row + 1)
        loss = cross_entropy(problem.model(problem._x[part]), problem._y[part])
        gradients = torch.autograd.grad(loss, list(problem.model.parameters()))
        found.append(parameters_to_vector(gradients))
    return torch.stack(found) if found else torch.zeros(0, *problem.shape)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize("algorithm", [FedGD(clip=0.8), FedSOFIM(clip=0.8)], ids=["gd", "sofim"])
@pytest.mark.parametrize("unit", ["record", "user"])
def test_uploads_are_the_clipped_sums_of_single_samples(algorithm, unit, dtype, tolerance):
    problem = problem_of((9, 0, 1, 14), dtype=dtype, physical_batch_size=4)
    told = terms(problem, unit, "each_upload", records=10.0)
    run = federation(algorithm, problem, told, epsilon=None)
    seen = watched(run)
    for index in range(2):
        theta = run.model().clone()
        run.round()
        problem.set(theta)
        for client, rows in enumerate(problem._parts):
            gradients = single_gradients(problem, rows).double()
            if unit == "record":
                norms = gradients.norm(dim=1)
                assert len(rows) == 0 or norms.max() > 0.8
                wanted = (gradients * (0.8 / norms).clamp(max=1)[:, None]).sum(0) / 10
            else:
                wanted = gradients.sum(0) / 10
                wanted = wanted * min(1.0, 0.8 / max(wanted.norm().item(), 1e-300))
            error = (seen[index][1][client].double() - wanted).norm()
            # Relative to what is added up: single gradients cancel in the sum.
            assert error <= tolerance * gradients.norm(dim=1).sum() / 10


@pytest.mark.parametrize("unit", ["record", "user"])
def test_batched_clients_upload_what_they_do_in_turn(unit):
    models = []
    for batched in (True, False):
        problem = problem_of((9, 0, 14))
        told = terms(problem, unit, records=10.0)
        models.append(finish(federation(FedGD(), problem, told, batched=batched)).model())
    assert torch.equal(*models)


def test_records_that_are_not_finite_add_nothing():
    whole, broken = problem_of((6, 6)), problem_of((6, 6))
    row = int(broken._parts[0][2])
    broken._x = broken._x.clone()
    broken._x[row] = torch.nan
    cohort = whole.cohort(torch.arange(2))
    theta = whole.initial()
    sums = whole.clipped_gradient_sums(cohort, theta, 0.5)
    without = broken.clipped_gradient_sums(broken.cohort(torch.arange(2)), theta, 0.5)
    whole.set(theta)
    own = single_gradients(whole, whole._parts[0][2:3])[0]
    own = own * min(1.0, 0.5 / own.norm().item())
    torch.testing.assert_close(without[0], sums[0] - own, rtol=1e-4, atol=1e-6)
    assert torch.equal(without[1], sums[1])


def test_sums_are_projected_to_what_their_sensitivity_assumes():
    problem = problem_of((20, 3))
    cohort, theta = problem.cohort(torch.arange(2)), problem.initial()
    plain = problem.clipped_gradient_sums(cohort, theta, 0.5)
    lengths = plain.norm(dim=1)
    most = float(lengths.mean()) / 0.5  # between the two clients'
    found = problem.clipped_gradient_sums(cohort, theta, 0.5, most)
    assert lengths[1] < most * 0.5 < lengths[0]
    assert torch.equal(found[1], plain[1])
    assert most * 0.5 * (1 - 1e-6) < found[0].double().norm() <= most * 0.5 * (1 + 1e-6)
    torch.testing.assert_close(found[0], plain[0] * (most * 0.5 / lengths[0]))


def test_a_round_leaves_theta_and_the_given_model_alone():
    problem = problem_of((9, 5))
    run = federation(FedGD(), problem, terms(problem))
    run.round()
    theta = run.server["theta"]
    before = theta.clone()
    problem.clipped_gradient_sums(problem.cohort(torch.arange(2)), theta, 1.0)
    problem.gradient_sums(problem.cohort(torch.arange(2)), theta)
    assert torch.equal(theta, before)
    assert torch.equal(problem.initial(), parameters_to_vector(small_cnn().parameters()))


@pytest.mark.parametrize("algorithm", [FedGD(lr=1.0), FedSOFIM(lr=0.5)], ids=["gd", "sofim"])
def test_it_trains_without_noise(algorithm):
    problem = problem_of((100,) * 6)
    run = federation(algorithm, problem, terms(problem, records=100.0, rounds=12), epsilon=None)
    before = run.accuracy()
    assert finish(run).accuracy() > max(0.6, before + 0.3)


@pytest.mark.parametrize(("unit", "epsilon", "clients"), [("record", 8.0, 6), ("user", 20.0, 300)])
def test_a_private_run_learns(unit, epsilon, clients):
    problem = problem_of((1200 // clients,) * clients)
    told = terms(problem, unit, records=1200 / clients, rounds=10)
    run = federation(FedGD(lr=1.0, momentum=0.5), problem, told, epsilon=epsilon, delta=1e-4)
    before = run.accuracy()
    assert finish(run).accuracy() > before + 0.3
    assert 0 < run.epsilon() <= epsilon


@pytest.mark.parametrize("unit", ["record", "user"])
def test_a_model_that_keeps_statistics_of_records_is_refused(unit):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(Unsupported, match="BatchNorm"):
        problem_of((9, 5), model=model)


def test_clients_that_share_a_record_are_refused():
    x, y = images()
    parts = [torch.arange(5), torch.arange(4, 9)]
    with pytest.raises(ValueError, match="disjoint"):
        ModelProblem(small_cnn(), x, y, parts, x, y)


@pytest.mark.parametrize(
    "algorithm", [FedFC(), FedNew(hessian="exact"), FedNew(hessian="cg")], ids=lambda a: a.name
)
def test_algorithms_that_need_features_say_so_for_a_model(algorithm):
    problem = problem_of((9, 5))
    run = federation(algorithm, problem, terms(problem))
    with pytest.raises(TypeError, match="softmax regression only"):
        run.round()
