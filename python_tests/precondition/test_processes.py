"""Several processes have the factors, and end with the parameters, that one process has."""

from __future__ import annotations

import warnings

import pytest
import torch

from python_tests.engine.distributed.processes import run
from python_tests.engine.oracle import assert_same
from python_tests.precondition.process_scenarios import (
    copies,
    network,
    other_convolutions,
    other_probes,
    scaled_copies,
    scaled_shards,
    shards,
    train,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    scenarios = [copies, shards, scaled_copies, scaled_shards, other_probes, other_convolutions]
    return run(scenarios, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["copies", "shards", "scaled_copies", "scaled_shards"])
def test_ranks_have_the_factors_and_parameters_of_one_process(ranks, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that without noise it is not private
        alone = train(network(), 0, 1, adadps=kind.startswith("scaled"))
    first, second = (rank[kind] for rank in ranks)
    assert all(torch.equal(first[name], second[name]) for name in alone)
    assert_same(first, alone)


def test_ranks_with_factors_of_other_probes_are_refused(ranks):
    for rank in ranks:
        assert rank["other_probes"].keys() == {"Kfac", "AdaDPS"}
        for message in (*rank["other_probes"].values(), rank["other_convolutions"]):
            assert "what the preconditioner is estimated from must be the same on all" in message
