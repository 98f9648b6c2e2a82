"""What is seen of a round has the noise that its statement says, once, in every view."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from dpkernels.federated import (
    FedGD,
    FedNew,
    FedSOFIM,
    Message,
    ModelProblem,
    Scaffold,
    SoftmaxProblem,
)
from dpkernels.ops.glm import Records
from python_tests.federated.cases import (
    ALGORITHMS,
    SERVED,
    federation,
    finish,
    problem_for,
    sampler,
    terms,
    watched,
)

CLIENTS, WIDTH = 6, 1500
# The variance of n Gaussian numbers is known to sqrt(2 / n) of itself; five of these.
FIVE = 5 * math.sqrt(2 / (3 * WIDTH))


def empty(clients=CLIENTS, width=WIDTH):
    """Clients without records: all that they upload is noise."""
    labels = torch.zeros(1, dtype=torch.int64)
    table = Records.ragged(torch.zeros(0, width), labels[:0], [0] * (clients + 1))
    return SoftmaxProblem(table, torch.zeros(1, width), labels, classes=3)


def stated(run, stage=0):
    """Return the variance that one release has to have, from the statement."""
    queries = run.statement(run.stages[stage]).queries
    assert len({query.noise_std for query in queries}) == 1
    return queries[0].noise_std ** 2


def is_about(variance, wanted):
    assert wanted > 0
    assert abs(variance / wanted - 1) < FIVE


@pytest.mark.parametrize("unit", ["record", "user"])
def test_each_upload_has_all_the_noise_of_its_statement(unit):
    held = empty()
    run = federation(FedGD(clip=3.0), held, terms(held, unit, "each_upload"))
    seen = watched(run)
    run.round()
    for upload in seen[0][1]:
        is_about(upload.double().var().item(), stated(run))


@pytest.mark.parametrize("dropouts", [0, 2])
@pytest.mark.parametrize("unit", ["record", "user"])
def test_the_sum_of_the_clients_that_must_answer_has_the_noise_of_the_statement(unit, dropouts):
    held = empty()
    run = federation(FedGD(clip=3.0), held, terms(held, unit), max_dropouts=dropouts)
    seen = watched(run)
    run.round()
    uploads = seen[0][1].double()
    is_about(uploads[: CLIENTS - dropouts].sum(0).var().item(), stated(run))
    # More answers are more noise, never less.
    wanted = stated(run) * CLIENTS / (CLIENTS - dropouts)
    is_about(uploads.sum(0).var().item(), wanted)
    # The server has the sum over the public number of clients.
    is_about(run.server["velocity"].double().var().item(), wanted / CLIENTS**2)


@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize("size", [1e-9, 3.0], ids=["nobody", "some"])
def test_under_poisson_sampling_the_sum_has_noise_once_whoever_was_drawn(unit, size):
    held = empty()
    told = terms(held, unit, adjacency="add-remove")
    drawn = sampler("poisson", CLIENTS, size)
    run = federation(FedGD(), held, told, sampler=drawn, accountant="rdp")
    run.multipliers["gradient"] = 2.0
    seen = watched(run)
    run.round()
    assert not seen[0][1].any()  # clients add none
    is_about((run.server["velocity"].double() * size).var().item(), stated(run))


def test_the_mean_gradient_of_fedsofim_has_the_variance_of_the_paper():
    # Var(G_j) = (C sigma)^2 / (n |D|)^2, with sigma over C, here under add-remove adjacency.
    held = empty()
    told = terms(held, adjacency="add-remove", records=50.0)
    algorithm = FedSOFIM(clip=10.0, beta=0.0)
    run = federation(algorithm, held, told)
    run.round()
    sigma = run.multipliers["gradient"]
    wanted = (10.0 * sigma) ** 2 / (CLIENTS * 50.0) ** 2
    is_about(run.server["momentum"].double().var().item(), wanted)


@pytest.mark.parametrize(("name", "unit"), SERVED)
@pytest.mark.parametrize("view", ["aggregate", "each_upload"])
def test_every_release_of_every_algorithm_gets_its_noise_once(name, unit, view):
    algorithm = ALGORITHMS[name]
    held = problem_for(algorithm, (0,) * CLIENTS)
    if not isinstance(held, ModelProblem):
        held = empty(width=40)
    run = federation(algorithm, held, terms(held, unit, view))
    seen = []

    class Noting:
        def __init__(self, noise):
            self.noise = noise

        def __call__(self, values):
            before = values.clone()
            after = self.noise(values)
            seen.append((after - before).double())
            return after

    client = type(algorithm).client

    class Watched(type(algorithm)):
        def client(self, visit):
            return client(self, replace(visit, noisy=Noting(visit.noisy)))

    run.algorithm = Watched(**vars(algorithm))
    for stage in run._schedule:
        seen.clear()
        run.round()
        assert len(seen) == stage.releases
        std = run.release.client_std(stage, run.multipliers[stage.name])
        assert std > 0
        rows = torch.cat([noise.flatten(1) for noise in seen])
        assert len(rows.unique(dim=0)) == stage.releases * CLIENTS
        for noise in seen:
            assert tuple(noise.shape) == (CLIENTS, *stage.query.shape)
            assert abs(noise.std().item() / std - 1) < 5 / math.sqrt(2 * noise.numel())


def test_local_steps_of_a_round_are_stated_together():
    held = empty()
    told = terms(held, view="each_upload")
    run = federation(Scaffold(local_steps=4, control="none"), held, told)
    statement = run.statement(run.stages[0])
    assert len(statement.queries) == 4
    one = replace(statement, queries=statement.queries[:1])
    assert statement.noise_multiplier == pytest.approx(one.noise_multiplier / 2)


@dataclass(frozen=True)
class Calls(FedGD):
    """Calls ``noisy`` so often, on so many more elements than it should."""

    times: int = 1
    more: int = 0

    def client(self, visit):
        cohort, shape = visit.cohort, visit.terms.shape
        values = torch.zeros(len(cohort), *shape)
        for _ in range(self.times):
            visit.noisy(torch.zeros(len(cohort), *shape[:-1], shape[-1] + self.more))
        return values, {}


@pytest.mark.parametrize("view", ["aggregate", "each_upload"])
@pytest.mark.parametrize(
    ("times", "more", "error", "says"),
    [
        (0, 0, RuntimeError, "must call noisy 1 times"),
        (2, 0, RuntimeError, "would not be accounted"),
        (1, 1, ValueError, "must be"),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_noise_too_rarely_too_often_or_in_another_shape_is_refused(
    view, times, more, error, says, batched
):
    held = empty(width=4)
    run = federation(Calls(times=times, more=more), held, terms(held, view=view), batched=batched)
    before = run.model().clone()
    with pytest.raises(error, match=says):
        run.round()
    assert run.rounds_released == 0 and torch.equal(run.model(), before)


def test_noise_of_a_round_that_failed_is_never_used_again():
    held, uploads = empty(width=4), []

    def lose_two(index, ids, values):
        uploads.append(values.clone())
        messages = [Message(int(i), index, value) for i, value in zip(ids, values, strict=True)]
        return messages[2:] if index <= 2 else messages

    run = federation(FedGD(), held, terms(held, rounds=1), transport=lose_two, max_dropouts=1)
    assert [run.round().released for _ in range(3)] == [False, False, True]
    rows = torch.cat([values.flatten(1) for values in uploads])
    assert len(rows.unique(dim=0)) == 3 * CLIENTS


def test_a_wider_query_does_not_share_noise_between_its_elements():
    held = empty(width=40)
    run = federation(FedNew(hessian="none"), held, terms(held, view="each_upload"))
    seen = watched(run)
    run.round()
    assert len(seen[0][1].flatten().unique()) == seen[0][1].numel()


@dataclass(frozen=True)
class Broken(FedGD):
    """Gives ``noisy`` a row that is not finite, where ``row`` says so."""

    row: int | None = None

    def client(self, visit):
        values = torch.zeros(len(visit.cohort), *visit.terms.shape)
        if self.row is not None:
            values[self.row, 0, 0] = torch.inf
        return visit.noisy(values), {}


def test_a_client_that_could_not_compute_uploads_noise_alone():
    held, seen = empty(width=4), []
    for row in (None, 2):
        run = federation(Broken(row=row), held, terms(held, view="each_upload"))
        uploads = watched(run)
        run.round()
        seen.append(uploads[0][1])
    assert torch.equal(*seen)


@pytest.mark.parametrize(("size", "local_lr"), [(10.0, 1e-3), (100.0, 1e-3), (1.0, 1e-5)])
def test_a_share_of_noise_is_not_lost_in_the_digits_of_theta(size, local_lr):
    # theta - (theta - local_lr noise) in float32 has a quarter of the noise at 10, none at 100.
    held = empty(clients=200, width=500)
    held.initial = lambda: torch.full(held.shape, size)
    told = replace(terms(held, "record", "aggregate", rounds=3), records=1000.0)
    algorithm = Scaffold(lr=1e-30, local_lr=local_lr, local_steps=1, control="none")
    run = federation(algorithm, held, told, epsilon=10.0)
    seen = watched(run)
    finish(run)
    variance = torch.stack([uploads.double().sum(0) for _, uploads in seen]).var().item()
    is_about(variance, local_lr**2 * stated(run))
