"""Small federations for the tests of this folder: problems, terms, and every algorithm."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.federated import (
    PPSGD,
    Algorithm,
    Centaur,
    Centred,
    FedCEO,
    Federation,
    FedFC,
    FedGD,
    FedNew,
    FedSOFIM,
    LocalDPSGD,
    ModelProblem,
    Problem,
    Scaffold,
    SoftmaxProblem,
    Terms,
    UDPFedAvg,
    Visit,
)
from dpkernels.federated.algorithms.local_training import LocalTraining
from dpkernels.ops.glm import Records
from dpkernels.privacy.samplers import FixedSizeSampler, PoissonSampler, ShuffledSampler

CLASSES, FEATURES = 3, 4
COUNTS = (7, 0, 1, 12, 5)  # unequal, and one client without records
UNITS = ("record", "user")
VIEWS = ("aggregate", "each_upload")

ALGORITHMS: dict[str, Algorithm] = {
    "fedgd": FedGD(),
    "fedgd momentum": FedGD(momentum=0.9),
    "fedgd average": FedGD(average=0.5),
    "fedsofim": FedSOFIM(),
    "fedsofim window": FedSOFIM(window=2),
    "fedfc": FedFC(),
    "scaffold none": Scaffold(control="none", local_steps=2),
    "scaffold uploaded": Scaffold(control="uploaded", local_steps=2),
    "scaffold clean": Scaffold(control="clean", local_steps=2),
    "centred fedgd": Centred(FedGD(), feature_clip=2.0),
    "centred fedfc": Centred(FedFC(), feature_clip=2.0),
    "centred fednew uploaded": Centred(FedNew(dual="uploaded"), feature_clip=2.0),
    **{
        f"fednew {hessian} {dual}": FedNew(hessian=hessian, dual=dual)
        for hessian in ("exact", "cg", "covariance", "none")
        for dual in ("none", "uploaded", "clean")
    },
    **{
        f"fednew {hessian} clean radius": FedNew(hessian=hessian, dual="clean", radius=0.2)
        for hessian in ("exact", "covariance", "none")
    },
    "fednew xi": FedNew(rescale="xi", hessian="exact"),
    "udp-fedavg": UDPFedAvg(local_batch=4),
    "udp-fedavg controls": UDPFedAvg(momentum=0.5, decay=0.9, average=0.5),
    **{
        f"udp-fedavg {shrink} {shrunk}": UDPFedAvg(
            lr=1.0, clip=5.0, shrink=shrink, shrunk=shrunk, local_epochs=1
        )
        for shrink in ("energy", "scalar", "layer", "spectral")
        for shrunk in ("sum", "update", "filtered")
        if shrunk != "filtered" or shrink in ("scalar", "layer")
    },
    **{
        f"fedceo {restart}": FedCEO(restart=restart, interval=2, local_epochs=1, local_steps=2)
        for restart in ("mean", "own", "slot")
    },
    "local-dpsgd": LocalDPSGD(local_steps=3),
    "ppsgd": PPSGD(local_epochs=1),
    "centaur": Centaur(local_steps=2, head_steps=2),
}


def serves(algorithm: Algorithm, unit: str) -> bool:
    """Whether the algorithm takes the unit; ``stages`` says so for itself too."""
    inner = getattr(algorithm, "inner", algorithm)
    if isinstance(inner, UDPFedAvg | PPSGD | Centaur):
        return unit == "user"
    if isinstance(inner, LocalDPSGD):
        return unit == "record"
    if isinstance(inner, Scaffold) and inner.control == "clean":
        return unit == "user"
    return unit == "record" or getattr(inner, "radius", None) is None


# Every algorithm with every unit that it serves.
SERVED = [
    (name, unit)
    for name, algorithm in ALGORITHMS.items()
    for unit in UNITS
    if serves(algorithm, unit)
]


def records(counts=COUNTS, *, dtype=torch.float32, seed=0, scale=1.0) -> Records:
    """Return records of clients with ``counts`` of them, away from 0 in the mean."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    x = torch.randn(total, FEATURES, generator=generator, dtype=torch.float64) + 0.5
    labels = torch.randint(CLASSES, (total,), generator=generator)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return Records.ragged((scale * x).to(dtype), labels, offsets)


def problem(counts=COUNTS, **options: Any) -> SoftmaxProblem:
    """Return softmax regression on ``records``, tested on eight more."""
    held, test = records(counts, **options), records((8,), seed=99)
    return SoftmaxProblem(held, test.x, test.labels, classes=CLASSES)


def network(counts=COUNTS, **options: Any) -> ModelProblem:
    """Return a network of two layers on ``records``, with biases, tested on eight more."""
    held, test = records(counts, **options), records((8,), seed=99)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    model = nn.Sequential(*layers).to(held.x.dtype)
    parts = [torch.arange(begin, end) for begin, end in held.spans.tolist()]
    test_x = test.x.to(held.x.dtype)
    return ModelProblem(model, held.x, held.labels, parts, test_x, test.labels)


def problem_for(algorithm: Algorithm, counts=COUNTS, **options: Any) -> Problem:
    """Return ``network`` for an algorithm that trains inside clients, else ``problem``."""
    make = network if isinstance(algorithm, LocalTraining | Centaur) else problem
    return make(counts, **options)


def features(held: Any) -> Tensor:
    """Return the features of all records, ``[N, d]``, to be changed in place."""
    return held.records.x if isinstance(held, SoftmaxProblem) else held._x


def terms(held: Any, unit="record", view="aggregate", **changes: Any) -> Terms:
    """Return terms for ``held``: three rounds, |D| = 8, replace-one."""
    options: dict[str, Any] = {"records": 8.0, "rounds": 3, "adjacency": "replace-one"}
    options |= {"layers": held.layers} | changes
    return Terms(held.clients, shape=held.shape, unit=unit, view=view, **options)


def federation(algorithm: Algorithm, held: Any, told: Terms, **options: Any) -> Federation:
    """Return a federation with epsilon 5; ``seed`` is 1 unless it is said to be None."""
    chosen: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-3, "seed": 1, "accountant": "gaussian"}
    return quietly(Federation, algorithm, held, told, **chosen | options)


def quietly(call: Any, *arguments: Any, **options: Any) -> Any:
    """Return what ``call`` returns, without the warning of a fixed seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments, **options)


def sampler(kind: str, clients: int, size: int, seed: int | None = 3, **options: Any) -> Any:
    """Return a sampler of ``size`` of the clients, in expectation if it is Poisson."""
    if kind == "poisson":
        return quietly(PoissonSampler, clients, size / clients, seed=seed, **options)
    kinds = {"fixed": FixedSizeSampler, "shuffled": ShuffledSampler}
    return quietly(kinds[kind], clients, size, seed=seed, **options)


def watched(run: Federation) -> list[tuple[Tensor, Tensor]]:
    """Return a list that gets (clients, uploads) of every round, as they leave the clients."""
    seen: list[tuple[Tensor, Tensor]] = []
    step = run._clients_step

    def noting(stage: Any, ids: Tensor, *sent: Any) -> Any:
        uploads, state = step(stage, ids, *sent)
        seen.append((ids.clone(), uploads.clone()))
        return uploads, state

    run._clients_step = noting
    return seen


def finish(run: Federation) -> Federation:
    """Run all rounds that are left."""
    while not run.finished:
        run.round()
    return run


def upload_of(
    algorithm: Algorithm,
    told: Terms,
    held: SoftmaxProblem,
    sent: dict[str, Tensor],
    *,
    stage: int = 0,
    state: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what all clients of ``held`` release before the noise, and their new state."""
    which = algorithm.stages(told)[stage]
    if state is None:
        start = algorithm.client_start(told, held.initial())
        state = {name: value.expand(held.clients, *value.shape) for name, value in start.items()}
    cohort = held.cohort(torch.arange(held.clients))
    released: list[Tensor] = []

    def quiet(values: Tensor) -> Tensor:
        released.append(values.clone())
        return values

    _, after = algorithm.client(Visit(which, told, held, cohort, state, sent, quiet))
    return torch.stack(released, 1), after


def split(held: Any) -> list[Problem]:
    """Return every client's problem, each with a table of its own."""
    if isinstance(held, ModelProblem):
        tests = held._x_test, held._y_test
        return [
            ModelProblem(held.model, held._x[p], held._y[p], [torch.arange(len(p))], *tests)
            for p in held._parts
        ]
    tables, whole = [], held.records
    for begin, end in whole.spans.tolist():
        own = Records.ragged(whole.x[begin:end], whole.labels[begin:end], [0, end - begin])
        tables.append(SoftmaxProblem(own, held.x_test, held.y_test, classes=CLASSES))
    return tables


def offsets_of(counts: Any) -> list[tuple[int, int]]:
    """Return the rows of every client."""
    return list(pairwise(torch.tensor([0, *counts]).cumsum(0).tolist()))
