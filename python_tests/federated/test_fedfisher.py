"""FedFisher under the federated contract: what clients send, and what the server makes of it."""

from __future__ import annotations

import math

import pytest
import torch

from dpkernels.federated import FedFisher, Message
from dpkernels.federated.fisher_vectors import packed_fisher, unpacked_fisher
from dpkernels.federated.merging import ConjugateGradients, merge
from dpkernels.federated.record_factors import record_signs
from dpkernels.fisher import fisher_information
from dpkernels.fisher.errors import sign_errors
from dpkernels.fisher.estimate import information
from python_tests.federated.cases import finish, watched
from python_tests.federated.fedfisher_cases import (
    CLASSES,
    COUNTS,
    PLAIN,
    SETTINGS,
    federation,
    made,
    problem,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def states_of(run, models):
    sizes = [math.prod(layer.shape) for layer in run.problem.layers]
    return [
        {x.name: p.view(x.shape) for x, p in zip(run.problem.layers, w.split(sizes), strict=True)}
        for w in models
    ]


def flat(run, state):
    return torch.cat([state[layer.name].flatten() for layer in run.problem.layers])


def test_one_round_without_a_budget_is_local_training_and_a_merge():
    held = problem(dtype=torch.float64)
    run = federation(PLAIN, held, epsilon=None)
    seen, theta = watched(run), held.initial()
    finish(run)
    ((ids, uploads),) = seen
    size, layout = theta.numel(), PLAIN.layout(run.terms)
    models = theta + uploads[:, :size]
    fishers = [unpacked_fisher(layout, row[size:-1]) for row in uploads]
    assert torch.equal(uploads[:, -1], torch.tensor(COUNTS, dtype=torch.float64))
    for row, model, part in zip(range(len(ids)), models, held._parts, strict=True):
        if len(part):
            # A has no chance in it; how G is estimated is the matter of ``fisher``'s own tests.
            exact = fisher_information(held.model_at(model), [held._x[part]], expectation="exact")
            for name, block in exact.layers.items():
                torch.testing.assert_close(fishers[row].layers[name].a, block.a, **EXACT)
    there = [0, 1, 3]
    expected = merge(
        [states_of(run, models)[i] for i in there],
        [fishers[i] for i in there],
        weights=[float(COUNTS[i]) for i in there],
        solver=ConjugateGradients(iterations=50),
    )
    torch.testing.assert_close(run.model(), flat(run, expected.state), rtol=1e-7, atol=1e-9)
    mean = sum(COUNTS[i] * models[i] for i in there) / sum(COUNTS)
    assert (run.model() - mean).norm() > 1e-3 * (mean - theta).norm()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"view": "aggregate"}, "takes each W_i with its F_i"),
        ({}, {"unit": "user"}, "protects records, got unit 'user'"),
        ({"factors": "public"}, {}, "declared public, got none"),
        ({"factors": "some"}, {}, "factors must be one of records, public, probes, none"),
        ({"factor_share": 1.0}, {}, r"factor_share must be in \(0, 1\)"),
        ({"factor_steps": 0}, {}, "factor_steps must be >= 1"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_first_round(changes, options, message):
    with pytest.raises(ValueError, match=message):
        federation(FedFisher(**changes), problem(), **options)


def test_without_noise_and_clips_the_factors_are_those_of_the_released_models():
    algorithm = FedFisher(local_steps=2, local_lr=0.3, factor_clip=1e6)
    held = problem(dtype=torch.float64)
    run = federation(algorithm, held, epsilon=None)
    seen = watched(run)
    seeds = []
    client = FedFisher._released_factors

    def noting(self, visit):
        seeds.extend(visit.seeds().tolist())
        return client(self, visit)

    FedFisher._released_factors = noting
    try:
        finish(run)
    finally:
        FedFisher._released_factors = client
    (_, moved), (_, uploads) = seen
    layout, models = algorithm.layout(run.terms), held.initial() + moved
    assert torch.allclose(uploads[:, -1], torch.tensor(COUNTS, dtype=torch.float64))
    there = [i for i, count in enumerate(COUNTS) if count]
    expected = []
    for i in there:
        rows = held._parts[i]

        def errors(logits, rows=rows, seed=seeds[i]):
            yield sign_errors(logits.detach().log_softmax(1), record_signs(rows, CLASSES, seed))

        expected.append(information(held.model_at(models[i]), [held._x[rows]], errors, "kronecker"))
        torch.testing.assert_close(
            uploads[i, :-1], packed_fisher(layout, expected[-1]), rtol=1e-6, atol=1e-9
        )
    merged = merge(
        [states_of(run, models)[i] for i in there],
        expected,
        weights=[float(COUNTS[i]) for i in there],
    )
    torch.testing.assert_close(run.model(), flat(run, merged.state), rtol=1e-5, atol=1e-7)


def test_a_client_that_was_lost_once_is_not_merged():
    lost = {1: 0, 2: 1}  # its model, its factors

    def transport(index, ids, uploads):
        for client, upload in zip(ids.tolist(), uploads, strict=True):
            if lost[index] != client:
                yield Message(client, index, upload)

    run = made("none weighted", transport=transport, epsilon=None)
    seen = watched(run)
    theta = run.server["theta"].clone()
    finish(run)
    (_, moved), (_, counts) = seen
    weights = counts[[2, 3], -1]
    expected = theta + (weights[:, None] * moved[[2, 3]]).sum(0) / weights.sum()
    torch.testing.assert_close(run.model(), expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_clients_together_or_one_after_the_other_are_the_same(name):
    found = [finish(made(name, batched=batched)).model() for batched in (True, False)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert found[0].isfinite().all()


@pytest.mark.parametrize("name", ["plain", "records", "probes"])
def test_a_later_round_starts_from_the_merged_model(name):
    run = made(name, rounds=3)
    a_round = len(run._schedule) // 3
    starts = []
    for _ in range(3):
        starts.append(run.server["theta"].clone())
        for _ in range(a_round):
            run.round()
            if not run.finished:
                sent = run.algorithm.broadcast(run.stages[0], run.server)
                assert torch.equal(sent["theta"], run.model())
    assert run.finished
    assert not any(torch.equal(one, run.model()) for one in starts)


@pytest.mark.parametrize("name", ["plain", "records", "records diagonal"])
@pytest.mark.parametrize("done", [1, 2])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name, done, tmp_path):
    whole = finish(made(name, rounds=2))
    begun = made(name, rounds=2)
    for _ in range(done):
        begun.round()
    begun.save(tmp_path / "state.pt")
    again = made(name, rounds=2)
    again.load(tmp_path / "state.pt")
    finish(again)
    assert torch.equal(again.model(), whole.model())
    assert again.epsilon() == whole.epsilon()


def test_what_the_server_merges_is_semidefinite_however_much_noise_there_is():
    run = made("records", epsilon=0.05)
    seen = watched(run)
    finish(run)
    layout = run.algorithm.layout(run.terms)
    for row in seen[1][1]:
        for block in unpacked_fisher(layout, row[:-1]).layers.values():
            for matrix in (block.a.double(), block.g.double()):
                # float32 uploads round by 2^-24 of the norm.
                least = torch.linalg.eigvalsh(matrix).min()
                assert least >= -(2.0**-22) * matrix.norm()
    assert run.model().isfinite().all()
