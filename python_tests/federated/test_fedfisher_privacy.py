"""What FedFisher releases of records: with which noise, at which models, and what it costs."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

from dpkernels.federated import FedFisher, ModelProblem
from dpkernels.federated.client_noise import ClientNoise
from dpkernels.federated.public_probes import kfac_at
from python_tests.federated.cases import finish, watched
from python_tests.federated.fedfisher_cases import (
    COUNTS,
    PLAIN,
    PRIVATE,
    federation,
    inputs,
    made,
    problem,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")


@pytest.mark.parametrize("budget", [{"epsilon": 5.0}, {"epsilon": None, "noise_multiplier": 1.0}])
def test_a_budget_for_what_is_not_private_is_refused(budget):
    with pytest.raises(ValueError, match="is not private: nothing bounds"):
        federation(PLAIN, problem(), **budget)
    run = federation(PLAIN, problem(), epsilon=None)
    assert "not private" in (run.void or "")
    finish(run)
    assert run.epsilon() is None and run.claimed_epsilon() is None


def delta_of(epsilon, mu):
    """Return the delta of a Gaussian mechanism, from its own formula (Balle and Wang, 2018)."""
    normal = NormalDist()
    tail = normal.cdf(-epsilon / mu - mu / 2)
    return normal.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * tail


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", ["records", "none weighted", "none"])
def test_epsilon_is_that_of_all_releases_of_one_client(name, rounds):
    run = finish(made(name, rounds=rounds))
    total = 0.0
    for stage in run.stages:
        std = run.release.client_std(stage, run.multipliers[stage.name])
        total += stage.rounds * stage.releases * (stage.query.sensitivity / std) ** 2
    spent = run.epsilon()
    assert spent is not None and 4.9 < spent <= 5.0
    assert delta_of(spent, math.sqrt(total)) == pytest.approx(1e-3, rel=1e-6)
    if len(run.stages) > 1:
        _, factors = run.stages[:2]
        std = run.release.client_std(factors, run.multipliers[factors.name])
        own = rounds * factors.releases * (factors.query.sensitivity / std) ** 2
        assert own / total == pytest.approx(0.2)


def test_the_sensitivity_is_the_root_of_the_number_of_parts_and_the_count_over_records():
    stage = made("records").stages[1]
    parts = 4  # A and G of two layers
    assert stage.query.sensitivity == pytest.approx(math.sqrt(parts + 1) / 8, rel=0.01)
    assert stage.query.sensitivity > math.sqrt(parts + 1) / 8
    assert made("none weighted").stages[1].query.sensitivity == pytest.approx(1 / 8, rel=0.01)


def test_a_record_moves_a_release_by_at_most_what_is_stated(monkeypatch):
    # The same seed, the same released models, one record less of client 1.
    counts, quiet = (5, 12, 6), {"epsilon": None}
    whole = problem(counts=counts)
    parts = list(whole._parts)
    parts[1] = parts[1][:-1]
    less = ModelProblem(whole.model, whole._x, whole._y, parts, whole._x[:8], whole._y[:8])
    found = []
    plain = ClientNoise.__call__

    def noting(self, values):
        found[-1].append(values.clone())
        return plain(self, values)

    monkeypatch.setattr(ClientNoise, "__call__", noting)
    for scale in (1e-3, 1.0, 1e3):
        apart = []
        whole._x[16] *= scale
        found.clear()
        for held in (whole, less):
            found.append([])
            run = federation(PRIVATE, held, **quiet)
            run._position = 1  # factors, at the first model
            run.round()
        whole._x[16] /= scale
        for one, other in zip(*found, strict=True):
            apart.append((one.double() - other.double()).flatten(1).norm(dim=1))
        stated = run.stages[1].query.sensitivity
        assert len(apart) == PRIVATE.factor_steps
        for each in apart:
            assert 0.5 * stated < float(each[1]) <= stated
            assert float(each[0]) == float(each[2]) == 0


def test_every_release_of_both_stages_gets_its_noise_once(monkeypatch):
    noises: dict[str, list[torch.Tensor]] = {}
    plain = ClientNoise.__call__

    def noting(self, values):
        before = values.clone()
        after = plain(self, values)
        noises.setdefault(self._stage.name, []).append((after - before).double())
        return after

    monkeypatch.setattr(ClientNoise, "__call__", noting)
    run = finish(made("records"))
    for stage in run.stages:
        found = torch.stack(noises[stage.name])
        assert len(found) == stage.releases
        std = run.release.client_std(stage, run.multipliers[stage.name])
        # The variance of n normal numbers is within 5 sqrt(2 / n) once in two million.
        assert float(found.var() / std**2) == pytest.approx(1, abs=5 * (2 / found.numel()) ** 0.5)
        flat_rows = found.flatten(2).transpose(0, 1).flatten(0, 1)
        assert torch.corrcoef(flat_rows).fill_diagonal_(0).abs().max() < 0.9


def test_factors_are_taken_at_models_as_they_were_released(monkeypatch):
    run = made("records")
    seen, asked = watched(run), []
    plain = ModelProblem.model_at

    def noting(self, theta, dtype=None):
        asked.append(theta.clone())
        return plain(self, theta, dtype)

    run.round()
    monkeypatch.setattr(ModelProblem, "model_at", noting)
    theta = run.server["theta"]
    run.round()
    assert torch.equal(torch.stack(asked), theta + seen[0][1])
    # A client's step before its noise is not what it is asked at.
    quiet = made("records", epsilon=None)
    before = watched(quiet)
    quiet.round()
    assert (before[0][1] - seen[0][1]).abs().max() > 1e-3


def test_nothing_of_a_client_but_what_it_is_sent_decides_where_factors_are_taken():
    run = made("records")
    run.round()
    other = torch.linspace(-1, 1, run.server["theta"].numel())
    run.server["waiting"] = other.expand_as(run.server["waiting"]).clone()
    asked = []
    held = run.problem
    plain = held.model_at
    held.model_at = lambda theta, dtype=None: (asked.append(theta.clone()), plain(theta, dtype))[1]
    theta = run.server["theta"]
    run.round()
    assert torch.equal(torch.stack(asked), (theta + other).expand(len(COUNTS), -1))


def test_noisy_counts_are_unbiased():
    # 300 clients of 7 records: 5 standard deviations of their mean.
    held = problem(counts=(7,) * 300)
    algorithm = FedFisher(local_steps=1, factors="none", factor_share=0.5)
    run = federation(algorithm, held)
    seen = watched(run)
    finish(run)
    stage = run.stages[1]
    std = 8 * run.release.client_std(stage, run.multipliers[stage.name])
    counts = seen[1][1][:, -1].double()
    assert std < 2  # so that next to none is cut off at 0
    assert abs(float(counts.mean()) - 7) < 5 * std / math.sqrt(300)


def test_probes_and_public_inputs_cost_no_budget():
    alone, held = made("none"), problem(public=inputs("linear", 10, dtype=torch.float32))
    for factors in ("public", "probes"):
        algorithm = FedFisher(local_steps=2, factors=factors, weights="equal")
        run = federation(algorithm, held)
        assert [stage.name for stage in run.stages] == ["models"]
        assert run.multipliers["models"] == alone.multipliers["models"]


def test_records_have_no_say_in_clips_and_factors_of_probes():
    found = []
    for scale in (1.0, 7.0):
        held = problem()
        held._x.mul_(scale)
        run = federation(FedFisher(local_steps=1, factors="probes", weights="equal"), held)
        run.round()
        theta = torch.zeros_like(held.initial())
        visit = type("Visit", (), {})()
        visit.problem, visit.terms, visit.cohort = held, run.terms, None
        visit.seeds = lambda: torch.zeros(1, dtype=torch.int64)
        found.append(run.algorithm._fishers(visit, theta[None]))
    assert torch.equal(*found)


@pytest.mark.parametrize("bound", [0.01, 1.0])
def test_preconditioned_gradients_are_clipped_after_the_preconditioner(bound):
    held = problem(counts=(1, 1), dtype=torch.float64)
    theta = held.initial()
    sides = kfac_at(held, theta)
    cohort = held.cohort(torch.arange(2))
    plain = held.clipped_gradient_sums(cohort, theta, 1e9)
    found = held.preconditioned(sides).clipped_gradient_sums(cohort, theta, bound)
    raw = held.preconditioned(sides).clipped_gradient_sums(cohort, theta, 1e9)
    # The factors from probes, applied densely: G right, of each layer with its bias.
    for index in range(2):
        expected, begin = [], 0
        for name, rows, columns in (("0", 5, 4), ("2", 3, 5)):
            weight = plain[index, begin : begin + rows * columns].view(rows, columns)
            bias = plain[index, begin + rows * columns : begin + rows * (columns + 1)]
            whole = torch.cat([weight, bias[:, None]], 1) @ sides.sides(name).right.matrix.double()
            expected += [whole[:, :-1].flatten(), whole[:, -1]]
            begin += rows * (columns + 1)
        torch.testing.assert_close(raw[index], torch.cat(expected), rtol=1e-6, atol=1e-8)
        norm = raw[index].norm()
        torch.testing.assert_close(found[index], raw[index] * min(1.0, bound / float(norm)))
    assert found.norm(dim=1).max() <= bound * (1 + 1e-6)
