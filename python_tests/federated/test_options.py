"""Options of ``dpkernels federate``: defaults that are sound, refusals that say what to do."""

from __future__ import annotations

import re

import pytest
import torch

from dpkernels.federated import ModelProblem
from dpkernels.federated.build import build
from dpkernels.federated.options import filled_in
from dpkernels.federated.settings import ALGORITHMS, SETTINGS
from python_tests.optional_packages import optional_package

optional_package("sklearn")
pytestmark = pytest.mark.filterwarnings("ignore:.*with the fixed seed")


@pytest.mark.parametrize(
    ("name", "level"), [(name, unit) for name, known in ALGORITHMS.items() for unit in known.units]
)
@pytest.mark.parametrize("view", ["aggregate", "each_upload"])
def test_no_default_is_a_step_without_a_guarantee(name, level, view):
    # Clients that keep a model of their own are not drawn in fixed numbers where that is secret.
    secret = ALGORITHMS[name].kind.personal and view == "aggregate"
    if view not in ALGORITHMS[name].views:
        with pytest.raises(ValueError, match=f"view: {name} is for each_upload, got {view}"):
            filled_in({"algorithm": name, "view": view})
        return
    drawn = "poisson:0.1" if secret else "fixed:10"
    # FedFisher asks the clients that have just trained again, so that all have to take part.
    for sampling in ("all",) if name == "fedfisher" else ("all", drawn):
        given = {"algorithm": name, "level": level, "view": view, "sampling": sampling}
        built = build(filled_in(given | {"rounds": 2, "seed": 0}))
        assert built.federation.void is None
        assert built.federation.release.terms.unit == level


@pytest.mark.parametrize(
    ("given", "adjacency"),
    [
        ({}, "add-remove"),
        ({"view": "each_upload"}, "add-remove"),
        ({"sampling": "fixed:10"}, "add-remove"),
        ({"record_rate": 0.5}, "add-remove"),
        ({"level": "user"}, "add-remove"),
        ({"level": "user", "sampling": "poisson:0.1"}, "add-remove"),
        ({"level": "user", "sampling": "fixed:10"}, "replace-one"),
        ({"level": "user", "sampling": "shuffled:10"}, "replace-one"),
        ({"level": "user", "view": "each_upload"}, "replace-one"),
    ],
    ids=str,
)
def test_the_adjacency_is_what_level_and_view_allow(given, adjacency):
    assert filled_in(given).adjacency == adjacency


@pytest.mark.parametrize(
    ("name", "level", "model"),
    [
        ("ours", "record", "logistic"),
        ("local-dpsgd", "record", "logistic"),
        ("udp-fedavg", "user", "mlp"),
        ("fedceo", "user", "mlp"),
        ("ppsgd", "user", "mlp"),
        ("centaur", "user", "mlp"),
        ("fedfisher", "record", "mlp"),
    ],
)
def test_an_algorithm_decides_whom_it_protects_and_what_it_trains(name, level, model):
    options = filled_in({"algorithm": name})
    assert (options.level, options.model) == (level, model)


def test_delta_is_below_one_over_the_public_number_of_units():
    assert build(filled_in({})).options.delta == 1e-5
    many = filled_in({"records_per_client": 1e4})
    assert build(many).options.delta == 1e-7  # of 10^6 records; below, not equal
    assert build(filled_in({"level": "user"})).options.delta == 1e-5


def test_the_number_of_records_is_declared_public_only_where_it_is_used():
    built = build(filled_in({}))
    assert built.total_declared and built.options.records_per_client == 14.37
    assert not build(filled_in({"records_per_client": 20})).total_declared


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_taken_by_the_algorithms_that_have_them(setting):
    for name, known in ALGORITHMS.items():
        if setting not in known.settings:
            with pytest.raises(ValueError, match=re.escape(f"{setting}: {name} does not take it")):
                filled_in({"algorithm": name, setting: 1})
            # Of fednew-fc the name decides; whoever reads its options finds nothing else.
            default = getattr(filled_in({"algorithm": name}), setting)
            assert default is None or setting in ("lr", "clip")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be a finite number > 0"),
        ({"epsilon": "nil"}, "epsilon must be one of none, a number > 0"),
        ({"level": "person"}, "level must be one of record, user"),
        ({"view": "all"}, "view must be one of aggregate, each_upload"),
        ({"sampling": "poisson"}, "sampling must be one of all, poisson:0.1"),
        ({"sampling": "fixed:101"}, "that fit 100 clients, got 'fixed:101'"),
        ({"sampling": "poisson:2"}, r"rate must be in \(0, 1\]"),
        ({"record_rate": 0.0}, r"record_rate must be in \(0, 1\]"),
        ({"partition": "dirichlet"}, "write dirichlet:0.1"),
        ({"public": "pca"}, "public must be one of centre, standardise, pca:100"),
        ({"algorithm": "fedgd", "centre_share": 0.1}, "take --centre"),
        ({"centre_share": 1.5}, r"share must be in \(0, 1\), got 1.5"),
        ({"model": "cnn"}, "model: ours is for softmax regression, got cnn"),
        ({"model": "cnn", "algorithm": "fedgd", "centre": True}, "fedgd with --centre is for"),
        ({"model": "cnn", "algorithm": "fedgd", "public": "centre"}, "leave --public out"),
        ({"max_dropouts": 2, "view": "each_upload"}, "max_dropouts: it is for a fixed number"),
        (
            {"adjacency": "add-remove", "level": "user", "view": "each_upload"},
            "adjacency must be r",
        ),
        ({"adjacency": "replace-one", "record_rate": 0.5}, "adjacency must be add-remove for"),
        ({"algorithm": "scaffold", "control": "magic"}, "control must be one of none, uploaded"),
        ({"rounds": 0}, "rounds must be an integer >= 1"),
        ({"algorithm": "udp-fedavg", "level": "record"}, "udp-fedavg protects users, got record"),
        ({"algorithm": "local-dpsgd", "level": "user"}, "local-dpsgd protects records, got user"),
        ({"algorithm": "fedceo", "model": "logistic"}, "train a network, got logistic; take"),
        ({"algorithm": "fedceo", "restart": "all"}, "restart must be one of own, slot, mean"),
        ({"algorithm": "fedceo", "public": "centre"}, "leave --public out"),
        ({"algorithm": "udp-fedavg", "model": "lstm"}, "tokens go with lstm, got lstm for digits"),
        ({"algorithm": "ppsgd", "local_epochs": 0}, "epochs and batch_size must be >= 1"),
        ({"algorithm": "fedfisher", "training": "sgd"}, "--training sgd is not private"),
        ({"algorithm": "fedfisher", "factors": "public"}, "public_inputs: --factors public takes"),
        ({"algorithm": "fedfisher", "public_inputs": 5}, "public_inputs: --factors public takes"),
        (
            {
                "algorithm": "fedfisher",
                "factors": "public",
                "public_inputs": 5,
                "validation": 9,
            },
            "puts private records in its place",
        ),
        ({"algorithm": "ppsgd", "local_momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"algorithm": "fedgd", "local_momentum": 0.9}, "leave --local-momentum out"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        filled_in(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delta": 0.01}, "delta must be less than 1 / the number of records, 0.0007"),
        ({"delta": 0.01, "level": "user"}, "delta must be less than 1 / the number of users, 0.01"),
        ({"public": "pca:65"}, "digits has 64 features, got pca:65"),
        ({"validation": 1437}, "validation must be 1 to 1436"),
        ({"partition": "natural"}, "partition: digits comes without one"),
        ({"max_dropouts": 100}, "max_dropouts must be from 0 to less than the 100 clients"),
        (
            {"algorithm": "fednew", "dual": "clean", "sampling": "fixed:10", "level": "user"},
            "needs the mean of every round",
        ),
        ({"algorithm": "scaffold", "local_steps": 2, "sampling": "poisson:0.1"}, "draw a fixed"),
        ({"algorithm": "ppsgd", "sampling": "fixed:10"}, "remembers which rounds they were in"),
        ({"algorithm": "fedceo", "restart": "own", "sampling": "poisson:0.1"}, "single uploads"),
        ({"algorithm": "fedceo", "model": "lenet5"}, "lenet5 takes images"),
        ({"algorithm": "fedfisher", "sampling": "fixed:10"}, "clients that have just trained"),
        (
            {"algorithm": "fedfisher", "factors": "public", "public_inputs": 360},
            "public_inputs must be 1 to 359",
        ),
        ({"algorithm": "fedceo", "model": "lenet"}, r"lenet takes images \[1, 28, 28\]"),
        ({"algorithm": "fedceo", "model": "cnn5x5"}, r"cnn5x5 takes images \[3, 32, 32\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_data_or_the_algorithm_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        build(filled_in(given))


def test_smoothing_is_refused_below_zero_and_for_records_that_are_no_images():
    with pytest.raises(ValueError, match="smooth must be"):
        filled_in({"smooth": -1.0})
    given = {"dataset": "synthetic", "smooth": 0.5, "rounds": 2, "seed": 0}
    with pytest.raises(ValueError, match=r"images \[C, H, W\]"):
        build(filled_in(given))
    smooth = build(filled_in({"algorithm": "udp-fedavg", "smooth": 0.5, "rounds": 2, "seed": 0}))
    plain = build(filled_in({"algorithm": "udp-fedavg", "rounds": 2, "seed": 0}))
    assert "smoothed" in smooth.data.note
    assert not smooth.data.x.equal(plain.data.x)


def test_public_inputs_leave_the_test_part():
    given = {"algorithm": "fedfisher", "factors": "public", "public_inputs": 60, "seed": 0}
    problem = build(filled_in(given)).federation.problem
    assert isinstance(problem, ModelProblem) and problem.public is not None
    whole = build(filled_in({"algorithm": "fedfisher", "seed": 0})).federation.problem
    assert torch.equal(problem.public, whole._x_test[:60])
    assert torch.equal(problem._x_test, whole._x_test[60:])
