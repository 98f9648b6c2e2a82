"""The benchmark's forms of the server compute what ``merge`` computes."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from benchmarks.federated.merging import (
    EINSUM,
    LENET,
    LONG,
    AdamLoop,
    Case,
    clients,
    compare,
    table,
)
from dpkernels.federated import Adam, merge
from dpkernels.fisher import Kronecker

SHAPES = ((3, 4), (5, 2))


@pytest.mark.parametrize("form", [EINSUM, LONG])
def test_adam_in_pytorch_is_ours(form) -> None:
    states, fishers = clients(SHAPES)
    loop = AdamLoop(states, fishers, form)
    for _ in range(20):
        loop.step()
    wanted = merge(states, fishers, solver=Adam(20)).state
    for found, name in zip(loop.weights, wanted, strict=True):
        torch.testing.assert_close(found.detach(), wanted[name])


def test_clients_have_the_fishers_that_are_named() -> None:
    _, fishers = clients(SHAPES)
    layer = fishers[0].layers["0.weight"]
    assert isinstance(layer, Kronecker)
    eigenvalues = torch.linalg.eigvalsh(layer.a).flip(0)
    torch.testing.assert_close(eigenvalues, torch.arange(1, 5) ** -1.5)
    assert sum(o * i for o, i in LENET) == 44_190


def test_the_table_says_whether_the_target_is_met() -> None:
    found = compare(Case("tiny", SHAPES, 100.0, 2, 2, True))
    assert found.weights == 22 and 0 < found.left[EINSUM] <= 1
    text = table([asdict(found)])
    assert "tiny, 22 weights" in text and "target 100: met" in text
    assert "MISSED" in table([asdict(found) | {"target": 0.0}])
