"""Clients and records: what sampling is worth, to whom, and in whose sight."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from dpkernels.privacy import (
    EveryRecord,
    GaussianQuery,
    Poisson,
    Shuffled,
    Statement,
    WithoutReplacement,
    adjacency_of,
    gaussian_step,
    make_accountant,
)
from dpkernels.privacy.accountants.exposure import amplification
from dpkernels.privacy.gaussian import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
RANDOM = (Poisson(0.1), WithoutReplacement(10, 100))
SAMPLINGS = (*RANDOM, Shuffled(10), EveryRecord())
# (unit, what is drawn, view): whether a random sample amplifies
AMPLIFIES = {
    ("record", "records", "aggregate"): True,
    ("record", "records", "each_upload"): True,
    ("record", "clients", "aggregate"): False,
    ("record", "clients", "each_upload"): False,
    ("user", "clients", "aggregate"): True,
    ("user", "clients", "each_upload"): False,
    ("user", "records", "aggregate"): False,
    ("user", "records", "each_upload"): False,
}


def spent(name, *runs):
    accountant = make_accountant(name)
    for statement, steps in runs:
        accountant.compose(statement, steps)
    return accountant


def exposed(statement, steps):
    """Return how many full exposures ``steps`` steps cost as much as."""
    mu = 1 / statement.noise_multiplier
    epsilon = spent("gaussian", (statement, steps)).epsilon(DELTA)
    (count,) = (
        count
        for count in range(steps + 1)
        if gaussian_epsilon(DELTA, mu * math.sqrt(count)) == pytest.approx(epsilon, rel=1e-9)
    )
    return count


@pytest.mark.parametrize("sampling", RANDOM)
@pytest.mark.parametrize("facts", AMPLIFIES)
def test_a_sample_amplifies_where_it_draws_the_unit_and_nobody_sees_whom(facts, sampling):
    unit, sampled, view = facts
    step = gaussian_step(4.0, sampling, unit=unit, view=view, sampled=sampled)
    if AMPLIFIES[facts]:
        assert amplification(step) == sampling
        full = gaussian_epsilon(DELTA, math.sqrt(7) / step.noise_multiplier)
        assert spent("pld", (step, 7)).epsilon(DELTA) < 0.5 * full
    else:
        assert amplification(step) is None
        assert exposed(step, 7) == 7


@pytest.mark.parametrize("facts", AMPLIFIES)
def test_a_shuffled_unit_is_exposed_once_an_epoch_unless_its_records_are_spread(facts):
    unit, sampled, view = facts
    step = gaussian_step(4.0, Shuffled(10), unit=unit, view=view, sampled=sampled)
    spread = (unit, sampled) == ("user", "records")
    assert exposed(step, 21) == (21 if spread else 3)


def test_epochs_of_records_and_of_clients_are_counted_apart():
    """One record may be in a batch of records and, in the same steps, in a cohort of clients."""
    facts = {"adjacency": "replace-one", "sampled": "clients"}
    records, clients = gaussian_step(4.0, Shuffled(10)), gaussian_step(4.0, Shuffled(10), **facts)
    both = spent("gaussian", (records, 5), (clients, 5)).epsilon(DELTA)
    assert both == spent("gaussian", (records, 20)).epsilon(DELTA)


@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_drawing_clients_does_not_amplify_for_a_record_because_the_sum_shows_its_client(
    sigma, rate
):
    """Exactly, in one dimension: the client's other records add u, the record in question 1.

    With the client's part of the sum far beyond the noise, outputs near u come from rounds with the
    client, and there the record has its full effect.
    """
    u = 100 * sigma
    z, h = np.linspace(-12 * sigma, u + 1 + 12 * sigma, 1_000_001, retstep=True)

    def density(moved):
        return (1 - rate) * norm.pdf(z, scale=sigma) + rate * norm.pdf(z, moved, sigma)

    def true_delta(epsilon):
        return h * np.maximum(density(u + 1) - math.exp(epsilon) * density(u), 0).sum()

    assert true_delta(1.0) == pytest.approx(rate * gaussian_delta(1.0, 1 / sigma), rel=1e-4)
    claimed = spent("pld", (gaussian_step(sigma, Poisson(rate)), 1)).epsilon(DELTA)
    assert true_delta(claimed) > 2 * DELTA
    ours = gaussian_step(sigma, Poisson(rate), sampled="clients")
    assert true_delta(spent("pld", (ours, 1)).epsilon(DELTA)) <= DELTA


ALLOWED = {
    Poisson: ("add-remove",),
    WithoutReplacement: ("replace-one",),
    Shuffled: ("replace-one",),
    EveryRecord: ("add-remove", "replace-one"),
}


def allowed(sampling, unit, sampled, view):
    if (unit, view) == ("user", "each_upload"):
        return ("replace-one",)
    if (unit, sampled) == ("record", "clients"):
        return ("add-remove", "replace-one")
    return ALLOWED[type(sampling)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("facts", AMPLIFIES)
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_an_adjacency_is_allowed_or_refused(sampling, facts, adjacency):
    unit, sampled, view = facts
    named = {"unit": unit, "sampled": sampled, "view": view}
    queries = (GaussianQuery(2.0, 1.0),)
    may = allowed(sampling, unit, sampled, view)
    assert adjacency_of(sampling, **named) == gaussian_step(1.0, sampling, **named).adjacency
    assert adjacency_of(sampling, **named) == may[0]
    if adjacency in may:
        assert Statement(queries, sampling, adjacency, **named).adjacency == adjacency
        return
    message = (
        "so is every user who joins or leaves"
        if (unit, view) == ("user", "each_upload")
        else f"{type(sampling).__name__} sampling is accounted under {may[0]} adjacency"
    )
    with pytest.raises(ValueError, match=message):
        Statement(queries, sampling, adjacency, **named)


def test_replacing_one_moves_a_clipped_upload_twice_as_far():
    step = gaussian_step(3.0, EveryRecord(), unit="user", view="each_upload")
    assert step.queries == (GaussianQuery(2.0, 3.0),)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"view": "each-upload"}, "view must be one of aggregate, each_upload, got 'each-upload'"),
        ({"sampled": "users"}, "sampled must be one of records, clients, got 'users'"),
        ({"view": "each_upload", "unit": "client"}, "unit must be 'record' or 'user'"),
    ],
)
def test_facts_that_are_not_known_are_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        gaussian_step(1.0, EveryRecord(), **facts)


@pytest.mark.parametrize(
    ("unit", "drawn"), [("record", "records"), ("user", "clients"), ("patient", "records")]
)
def test_the_unit_is_sampled_if_nothing_else_is_said(unit, drawn):
    step = gaussian_step(1.0, Poisson(0.1), unit=unit)
    assert step.sampled == drawn and step.draws_units
    assert amplification(step) == Poisson(0.1)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("facts", AMPLIFIES)
def test_statements_survive_json(sampling, facts):
    unit, sampled, view = facts
    step = gaussian_step(1.0, sampling, unit=unit, sampled=sampled, view=view)
    assert Statement.from_dict(json.loads(json.dumps(step.to_dict()))) == step


@pytest.mark.parametrize("unit", ["record", "user"])
def test_states_from_before_it_was_said_what_is_sampled_load(unit):
    step = gaussian_step(1.0, Poisson(0.1), unit=unit)
    state = spent("rdp", (step, 3)).state_dict()
    for statement, _ in state["history"]:
        assert statement.pop("sampled") == step.sampled
    accountant = make_accountant("rdp")
    accountant.load_state_dict(state)
    assert accountant.history == [(step, 3)]


def test_releases_about_records_and_about_clients_compose():
    """A release on all records, then rounds of drawn clients: one unit, one view, one epsilon."""
    release = gaussian_step(5.0, EveryRecord())
    rounds = gaussian_step(5.0, Poisson(0.1), sampled="clients")
    assert spent("gaussian", (release, 1), (rounds, 8)).epsilon(DELTA) == pytest.approx(
        gaussian_epsilon(DELTA, 3 / 5), rel=1e-9
    )


def test_with_noise_multiplies_the_noise_of_every_query_and_nothing_else():
    queries = (GaussianQuery(1.0, 2.0, 1e-12), GaussianQuery(3.0, 5.0))
    facts = {"unit": "user", "view": "each_upload", "sampled": "records", "void": "why"}
    statement = Statement(queries, Shuffled(4, run="a"), "replace-one", **facts)
    more = statement.with_noise(1.5)
    assert more.queries == (GaussianQuery(1.0, 3.0, 1e-12), GaussianQuery(3.0, 7.5))
    assert more == Statement(more.queries, Shuffled(4, run="a"), "replace-one", **facts)
    assert more.noise_multiplier == pytest.approx(1.5 * statement.noise_multiplier)
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale must be finite and >= 0"):
            statement.with_noise(scale)
