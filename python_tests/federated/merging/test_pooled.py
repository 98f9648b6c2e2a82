"""Least squares: merged by their exact Fishers, the clients' solutions are the pooled one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkernels.federated import ConjugateGradients, merge
from dpkernels.fisher import Diagonal, Fisher, Kronecker

TO_THE_END = ConjugateGradients(iterations=1000, tolerance=1e-12)
RECORDS = (30, 7, 12)


def data(features: int, outputs: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for records in RECORDS:
        x = torch.randn(records, features, generator=generator, dtype=torch.float64)
        x = x + torch.randn(features, generator=generator, dtype=torch.float64)
        found.append((x, torch.randn(records, outputs, generator=generator, dtype=torch.float64)))
    return found


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Return W ``[O, I]`` of the smallest norm that minimises |X W^T - Y|."""
    return (torch.linalg.pinv(x) @ y).mT


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("features", [5, 9])
def test_a_linear_layer(bias, features) -> None:
    # With 9 features the client of 7 records fits all of them, and its F is singular.
    states, fishers, inputs, outputs = [], [], [], []
    for x, y in data(features, 3):
        wide = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if bias else x
        w = least_squares(wide, y)
        state = {"fc.weight": w[:, :features]}
        if bias:
            state["fc.bias"] = w[:, features]
        a, g = wide.mT @ wide / len(x), torch.eye(3, dtype=x.dtype)
        layer = Kronecker("fc.weight", "fc.bias" if bias else None, a, g)
        states.append(state)
        fishers.append(Fisher({"fc": layer}, {}, len(x)))
        inputs.append(wide)
        outputs.append(y)
    found = merge(states, fishers, weights=RECORDS, solver=TO_THE_END).state
    wanted = least_squares(torch.cat(inputs), torch.cat(outputs))
    torch.testing.assert_close(found["fc.weight"], wanted[:, :features])
    if bias:
        torch.testing.assert_close(found["fc.bias"], wanted[:, features])


def test_least_squares_of_one_feature_each_by_diagonals() -> None:
    # Features that are orthogonal make F diagonal, so that the diagonal is exact as well.
    generator = torch.Generator().manual_seed(0)
    states, fishers, xs, ys = [], [], [], []
    for records in RECORDS:
        x = torch.linalg.qr(torch.randn(records, 4, generator=generator, dtype=torch.float64)).Q
        x = x * (1 + torch.rand(4, generator=generator, dtype=torch.float64))
        y = torch.randn(records, 1, generator=generator, dtype=torch.float64)
        states.append({"w": least_squares(x, y)})
        fishers.append(Fisher({"w": Diagonal("w", (x * x).sum(0)[None] / records)}, {}, records))
        xs.append(x)
        ys.append(y)
    wanted = least_squares(torch.cat(xs), torch.cat(ys))
    for solver in (TO_THE_END, ConjugateGradients(1, preconditioner="diagonal")):
        found = merge(states, fishers, weights=RECORDS, solver=solver).state
        torch.testing.assert_close(found["w"], wanted)


def test_a_layer_inside_of_a_deep_linear_network() -> None:
    """The clients train the layer in the middle; its exact Fisher, by autograd, is K-FAC's.

    Squared loss: F = mean of J^T J = B^T B (x) mean of (C x)(C x)^T, for the network B W C x.
    """
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    last = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(6, 4, False), nn.Linear(4, 3, False), nn.Linear(3, 5, False))
    net = net.double()

    def outputs(weight: Tensor, x: Tensor) -> Tensor:
        state = {"0.weight": first, "1.weight": weight, "2.weight": last}
        return torch.func.functional_call(net, state, (x,))

    records, states, fishers = data(6, 5), [], []
    for x, y in records:
        w = torch.linalg.pinv(last) @ y.mT @ torch.linalg.pinv(first @ x.mT)
        states.append({"0.weight": first, "1.weight": w, "2.weight": last})
        inner = x @ first.mT
        layer = Kronecker("1.weight", None, inner.mT @ inner / len(x), last.mT @ last)
        fishers.append(Fisher({"1": layer}, {}, len(x)))
        jacobian = torch.func.jacrev(outputs)(w, x).flatten(0, 1).flatten(1)
        torch.testing.assert_close(torch.kron(layer.g, layer.a), jacobian.mT @ jacobian / len(x))
    found = merge(states, fishers, weights=RECORDS, solver=TO_THE_END).state

    def pooled(weight: Tensor) -> Tensor:
        return sum(((outputs(weight, x) - y).square().sum() for x, y in records), torch.zeros(()))

    start = merge(states, weights=RECORDS, method="fedavg").state["1.weight"]
    slope = torch.func.grad(pooled)
    left, before = (torch.linalg.vector_norm(slope(w)) for w in (found["1.weight"], start))
    assert left <= 1e-10 * before
    torch.testing.assert_close(found["0.weight"], first)
