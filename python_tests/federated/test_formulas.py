"""Every algorithm against its formula, written out densely in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import hessian
from torch.nn.functional import cross_entropy

from dpkernels.federated import Centred, FedFC, FedGD, FedNew, FedSOFIM, Scaffold
from dpkernels.federated.algorithms.newton import Newton
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.triangles import packed, unpacked
from python_tests.federated.cases import (
    ALGORITHMS,
    COUNTS,
    SERVED,
    federation,
    finish,
    problem,
    problem_for,
    terms,
    upload_of,
)

EXACT = {"rtol": 1e-10, "atol": 1e-11}
COUNT = 8.0


def held(**options):
    return problem(dtype=torch.float64, **options)


def problem_in_float32():
    return problem()


def tables(problem):
    table = problem.records
    return [(table.x[a:b], table.labels[a:b]) for a, b in table.spans.tolist()]


def record_gradients(x: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
    def loss(weights, features, label):
        return cross_entropy((weights @ features)[None], label[None])

    return torch.stack(
        [torch.func.grad(loss)(theta, a, b) for a, b in zip(x, labels, strict=True)]
    ) if len(x) else theta.new_zeros(0, *theta.shape)  # fmt: skip


def record_hessians(x: Tensor, labels: Tensor, theta: Tensor) -> Tensor:
    size = theta.numel()

    def loss(weights, features, label):
        return cross_entropy((weights.view_as(theta) @ features)[None], label[None])

    dense = [hessian(loss)(theta.flatten(), a, b) for a, b in zip(x, labels, strict=True)]
    return torch.stack(dense) if dense else theta.new_zeros(0, size, size)


def clipped(values: Tensor, bound: float) -> Tensor:
    norms = values.flatten(1).norm(dim=1).clamp(min=1e-300)
    return values * (bound / norms).clamp(max=1).reshape(-1, *(1 for _ in values.shape[1:]))


def mean_gradients(problem, theta: Tensor, clip: float | None) -> Tensor:
    """Return each client's sum over |D|, records clipped if there is a bound."""
    sums = []
    for x, labels in tables(problem):
        gradients = record_gradients(x, labels, theta)
        sums.append((gradients if clip is None else clipped(gradients, clip)).sum(0) / COUNT)
    return torch.stack(sums)


def run_of(algorithm, problem, unit="record", rounds=3, **changes):
    told = terms(problem, unit, "each_upload", rounds=rounds, records=COUNT, **changes)
    return federation(algorithm, problem, told, epsilon=None)


def client_mean(problem, theta, unit, clip):
    """Return the mean over clients of what FedGD uploads."""
    if unit == "record":
        return mean_gradients(problem, theta, clip).mean(0)
    return clipped(mean_gradients(problem, theta, None), clip).mean(0)


@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedgd_is_gradient_descent_with_heavy_ball_momentum(unit, momentum):
    problem, clip = held(), 0.4
    run = run_of(FedGD(lr=0.7, clip=clip, momentum=momentum), problem, unit)
    theta = velocity = torch.zeros(problem.shape, dtype=torch.float64)
    for _ in range(3):
        velocity = momentum * velocity + client_mean(problem, theta, unit, clip)
        theta = theta - 0.7 * velocity
    torch.testing.assert_close(finish(run).model(), theta, **EXACT)


def test_the_average_is_that_of_the_last_iterates():
    problem = held()
    plain, averaged = (run_of(FedGD(average=average), problem, rounds=6) for average in (0.0, 0.5))
    iterates = []
    while not plain.finished:
        plain.round()
        averaged.round()
        iterates.append(plain.model())
    torch.testing.assert_close(averaged.model(), torch.stack(iterates[3:]).mean(0), **EXACT)


def test_fedsofim_solves_with_the_dense_matrix():
    problem, rho, beta, lr, clip = held(), 0.5, 0.9, 0.1, 0.4
    run = run_of(FedSOFIM(lr=lr, clip=clip, rho=rho, beta=beta), problem)
    theta = torch.zeros(problem.shape, dtype=torch.float64)
    momentum = torch.zeros(theta.numel(), dtype=torch.float64)
    for _ in range(3):
        gradient = client_mean(problem, theta, "record", clip).flatten()
        momentum = beta * momentum + (1 - beta) * gradient
        dense = rho * torch.eye(len(momentum)).double() + torch.outer(momentum, momentum)
        inverse = torch.linalg.inv(dense)
        values = torch.linalg.eigvalsh(inverse)
        assert values.min() >= 1 / (rho + momentum.dot(momentum)) - 1e-12
        assert values.max() <= 1 / rho + 1e-12
        theta = theta - lr * (inverse @ gradient).view_as(theta)
    torch.testing.assert_close(finish(run).model(), theta, **EXACT)


def test_fedsofim_with_a_window_has_the_last_gradients_second_moment():
    problem, rho, lr, window = held(), 0.5, 0.1, 2
    run = run_of(FedSOFIM(lr=lr, rho=rho, window=window), problem, rounds=4)
    theta, past = torch.zeros(problem.shape, dtype=torch.float64), []
    for _ in range(4):
        gradient = client_mean(problem, theta, "record", 1.0).flatten()
        past = [*past, gradient][-window:]
        stacked = torch.stack(past)
        dense = rho * torch.eye(len(gradient)).double() + stacked.T @ stacked / len(past)
        theta = theta - lr * torch.linalg.solve(dense, gradient).view_as(theta)
    torch.testing.assert_close(finish(run).model(), theta, **EXACT)


def dense_hessians(problem, theta, kind, bound):
    """Return each client's H, ``[k, C d, C d]``."""
    classes, width = theta.shape[0], theta.numel()
    found = []
    for x, labels in tables(problem):
        if kind == "covariance":
            squares = clipped(x[:, :, None] * x[:, None, :], bound).sum(0)
            found.append(torch.kron(torch.eye(classes).double(), squares) / COUNT)
        elif kind == "none":
            found.append(torch.zeros(width, width).double())
        else:
            found.append(clipped(record_hessians(x, labels, theta), bound).sum(0) / COUNT)
    return torch.stack(found)


@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize("dual", ["none", "uploaded", "clean"])
@pytest.mark.parametrize("kind", ["exact", "cg", "covariance", "none"])
def test_fednew_solves_dense_systems_from_autograd(kind, dual, unit):
    problem, alpha, rho, clip, total, curvature, lr = held(), 0.05, 0.2, 0.6, 0.3, 0.4, 0.8
    algorithm = FedNew(
        hessian=kind,
        dual=dual,
        alpha=alpha,
        rho=rho,
        clip=clip,
        total_clip=total,
        hessian_clip=curvature,
        lr=lr,
        tolerance=1e-12,
    )
    run = finish(run_of(algorithm, problem, unit))
    theta = torch.zeros(problem.shape, dtype=torch.float64)
    y = torch.zeros_like(theta)
    duals = torch.zeros(problem.clients, *theta.shape, dtype=torch.float64)
    eye = torch.eye(theta.numel()).double()
    for _ in range(3):
        matrices = dense_hessians(problem, theta, kind, curvature if unit == "record" else 1e30)
        s = mean_gradients(problem, theta, clip if unit == "record" else None) - duals + rho * y
        if unit == "record":
            s = clipped(s, total)
        own = torch.linalg.solve(matrices + (alpha + rho) * eye, s.flatten(1)).view_as(s)
        if unit == "user":
            own = clipped(own, clip)
        y = own.mean(0)
        theta = theta - lr * y
        if dual != "none":
            duals = duals + rho * (own - y)
    torch.testing.assert_close(run.model(), theta, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["exact", "covariance", "none"])
@pytest.mark.parametrize("radius", [0.05, 0.3, 10.0])
def test_a_solve_in_a_ball_satisfies_its_variational_inequality(kind, radius):
    problem, alpha, rho = held(), 0.05, 0.2
    algorithm = FedNew(hessian=kind, dual="clean", radius=radius, alpha=alpha, rho=rho)
    told = terms(problem, records=COUNT)
    generator = torch.Generator().manual_seed(0)
    theta, y = torch.randn(2, *problem.shape, generator=generator, dtype=torch.float64)
    found, _ = upload_of(algorithm, told, problem, {"theta": theta, "y": y})
    own = found[:, 0].flatten(1)
    # The first dual is rho (0 - y).
    s = (mean_gradients(problem, theta, 1.0) + 2 * rho * y).flatten(1)
    matrices = dense_hessians(problem, theta, kind, 1.0)
    eye = torch.eye(theta.numel()).double()
    downhill = s - torch.einsum("kij,kj->ki", matrices + (alpha + rho) * eye, own)
    assert (own.norm(dim=1) <= radius * (1 + 1e-12)).all()
    # max over the ball of downhill . (z - y) is radius |downhill| - downhill . y, 0 at a minimum;
    # the right-hand side may be off by the slack that is in the sensitivity.
    gain = radius * downhill.norm(dim=1) - (downhill * own).sum(1)
    inside = own.norm(dim=1) < radius * (1 - 1e-9)
    assert (downhill[inside].norm(dim=1) <= 1e-9).all()
    assert (gain[~inside] <= 2 * radius * 1e-2 / COUNT).all()
    assert bool((~inside).any()) == (radius < 10)


def test_fednew_without_curvature_is_momentum():
    # gamma y_i = g_i + rho y: y <- (rho / gamma) y + g / gamma, while nothing is clipped.
    problem, alpha, rho = held(), 0.2, 1.8
    new = FedNew(hessian="none", alpha=alpha, rho=rho, total_clip=1e6, lr=0.5)
    ball = FedGD(momentum=rho / (alpha + rho), lr=0.5 / (alpha + rho))
    models = [finish(run_of(algorithm, problem)).model() for algorithm in (new, ball)]
    torch.testing.assert_close(*models, **EXACT)


@pytest.mark.parametrize("unit", ["record", "user"])
def test_fedfc_preconditions_with_the_dense_covariance(unit):
    problem, bound, gamma, lr, clip = held(), 1.5, 0.3, 0.7, 0.4
    algorithm = FedFC(lr=lr, clip=clip, feature_clip=bound, gamma=gamma)
    squares = []
    for x, _ in tables(problem):
        own = x[:, :, None] * x[:, None, :]
        if unit == "record":
            squares.append(clipped(own, bound**2).sum(0) / COUNT)
        else:
            squares.append(clipped(own.sum(0)[None] / COUNT, bound**2)[0])
    covariance = torch.stack(squares).mean(0)
    inverse = torch.linalg.inv(covariance + gamma * torch.eye(len(covariance)).double())
    theta = torch.zeros(problem.shape, dtype=torch.float64)
    for _ in range(3):
        if unit == "record":
            step = mean_gradients(problem, theta, clip).mean(0) @ inverse
        else:
            step = clipped(mean_gradients(problem, theta, None) @ inverse, clip).mean(0)
        theta = theta - lr * step
    torch.testing.assert_close(finish(run_of(algorithm, problem, unit)).model(), theta, **EXACT)


def test_a_packed_covariance_has_the_norm_of_the_matrix_and_comes_back():
    matrices = torch.randn(4, 5, 5, dtype=torch.float64)
    matrices = matrices + matrices.mT
    vectors = packed(matrices)
    torch.testing.assert_close(vectors.norm(dim=1), matrices.flatten(1).norm(dim=1), **EXACT)
    torch.testing.assert_close(unpacked(vectors[1], 5), matrices[1], **EXACT)


@pytest.mark.parametrize("control", ["none", "uploaded"])
@pytest.mark.parametrize("unit", ["record", "user"])
def test_scaffold_follows_its_local_steps(unit, control):
    problem, lr, local, steps, clip = held(), 0.9, 0.5, 3, 0.4
    algorithm = Scaffold(lr=lr, local_lr=local, local_steps=steps, clip=clip, control=control)
    theta = torch.zeros(problem.shape, dtype=torch.float64)
    shared = torch.zeros_like(theta)
    own = torch.zeros(problem.clients, *theta.shape, dtype=torch.float64)
    for _ in range(3):
        uploads = []
        for client in range(problem.clients):
            y = theta
            for _ in range(steps):
                bound = clip if unit == "record" else None
                gradient = mean_gradients(problem, y, bound)[client]
                y = y - local * (gradient - own[client] + shared)
            uploads.append(theta - y)
        sent = torch.stack(uploads)
        if unit == "user":
            sent = clipped(sent, clip)
        if control != "none":
            own = own - shared + sent / (steps * local)
            shared = own.mean(0)
        theta = theta - lr * sent.mean(0)
    torch.testing.assert_close(finish(run_of(algorithm, problem, unit)).model(), theta, **EXACT)


def test_one_local_step_without_control_is_gradient_descent():
    problem = held()
    one = Scaffold(local_steps=1, control="none", local_lr=0.3, lr=1.0, clip=0.4)
    models = [
        finish(run_of(algorithm, problem)).model() for algorithm in (one, FedGD(lr=0.3, clip=0.4))
    ]
    torch.testing.assert_close(*models, **EXACT)


@pytest.mark.parametrize("unit", ["record", "user"])
def test_centred_trains_on_features_less_the_clipped_mean(unit):
    problem, bound, bias = held(), 0.8, 2.0
    run = run_of(Centred(FedGD(), feature_clip=bound, bias=bias), problem, unit)
    run.round()
    means = []
    for x, _ in tables(problem):
        total = clipped(x, bound).sum(0) if unit == "record" else x.sum(0)
        means.append(total / COUNT)
    stacked = torch.stack(means)
    mean = (stacked if unit == "record" else clipped(stacked, bound)).mean(0)
    torch.testing.assert_close(run.server["feature_mean"], mean, **EXACT)
    x = torch.cat((problem.records.x - mean, torch.full((len(problem.records.x), 1), bias)), 1)
    centred = problem.with_features(x.double(), torch.zeros(1, x.shape[1]))
    alone = run_of(FedGD(), centred, unit)
    torch.testing.assert_close(finish(run).model(), finish(alone).model(), **EXACT)


@pytest.mark.parametrize(("name", "unit"), SERVED)
def test_steps_do_not_write_into_the_state_they_are_given(name, unit):
    problem = problem_for(ALGORITHMS[name])
    run = federation(ALGORITHMS[name], problem, terms(problem, unit, "each_upload"))
    while not run.finished:
        server, clients = run.server, dict(run._clients)
        before = [{key: value.clone() for key, value in part.items()} for part in (server, clients)]
        seen = {}
        step = run._clients_step

        def noting(*arguments, step=step, clients=clients, before=before, seen=seen):
            found = step(*arguments)
            seen["same"] = all(torch.equal(clients[key], before[1][key]) for key in clients)
            return found

        run._clients_step = noting
        run.round()
        run._clients_step = step
        assert seen["same"]
        assert all(torch.equal(server[key], before[0][key]) for key in server)


def test_a_covariance_with_another_bound_is_not_the_one_that_was_kept():
    problem = held()
    cohort = problem.cohort(torch.arange(problem.clients))
    s = torch.ones(problem.clients, *problem.shape, dtype=torch.float64)
    settings = [(1.0, 0.1, 0.5), (0.2, 0.1, 0.5), (1.0, 0.3, 0.5), (1.0, 0.1, 0.1)]
    kept = [problem.covariance(cohort, *each).solve(s) for each in settings]
    afresh = [held().covariance(cohort, *each).solve(s) for each in settings]
    for one, other in zip(kept, afresh, strict=True):
        assert torch.equal(one, other)
    assert len({float(each.sum()) for each in kept}) == len(settings)
    spectra = [problem.covariance_spectrum(cohort, b, c)[0] for b, c in ((1.0, 1.0), (0.2, 1.0))]
    assert not torch.equal(*spectra)


def test_a_client_whose_conjugate_gradients_do_not_converge_is_solved_exactly():
    # A residual of 1e-9 is beyond float32.
    problem = problem_in_float32()
    cohort = problem.cohort(torch.arange(problem.clients))
    theta = torch.zeros(problem.shape)
    s = torch.randn(problem.clients, *problem.shape, generator=torch.Generator().manual_seed(0))
    solved = {
        kind: Newton(kind, problem, cohort, theta, 1.0, COUNT, 1e-9).solve(s, 0.01)
        for kind in ("cg", "exact")
    }
    with_records = [client for client, count in enumerate(COUNTS) if count > 1]
    assert torch.equal(solved["cg"][with_records], solved["exact"][with_records])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clipped_row_is_a_projection_and_zero_if_it_is_not_finite(dtype):
    rows = torch.randn(6, 3, 2, dtype=dtype) * torch.tensor([1e-30, 0.1, 1, 10, 1e15, 1])[
        :, None, None
    ].to(dtype)
    rows[5, 1, 1] = torch.nan
    found = clip_rows(rows, 0.7)
    norms, wanted = (each[:5].double().flatten(1).norm(dim=1) for each in (found, rows))
    assert (norms <= 0.7 * (1 + 1e-6)).all()
    torch.testing.assert_close(norms, wanted.clamp(max=0.7), rtol=1e-6, atol=0)
    assert not found[5].any()


@pytest.mark.parametrize("hessian", ["covariance", "none"])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_a_solve_in_a_ball_ends_in_the_ball_for_large_clients_and_pulls(hessian, size):
    # |D| = 1e6 asks for more digits of the multiplier than float32 has.
    held = problem()
    newton = Newton(
        hessian, held, held.cohort(torch.arange(held.clients)), held.initial(), 1.0, 1e6, 1e-4
    )
    generator = torch.Generator().manual_seed(0)
    s = size * torch.randn(held.clients, *held.shape, generator=generator)
    y = newton.solve_in_ball(s, 0.2, 0.1, 1e-2 / 1e6)
    norms = y.double().flatten(1).norm(dim=1)
    assert y.isfinite().all()
    assert (norms - 0.1).abs().max() < 1e-7
