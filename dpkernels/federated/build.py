"""A federated run as its options ask for it, before its first round."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dpkernels.federated.contract import Terms
from dpkernels.federated.data import (
    FederatedData,
    declared_public,
    holdout,
    load,
    of_synthetic,
)
from dpkernels.federated.loop import Federation
from dpkernels.federated.model import ModelProblem
from dpkernels.federated.networks import build as build_network
from dpkernels.federated.options import Options
from dpkernels.federated.partitions import Partition
from dpkernels.federated.problem import Problem
from dpkernels.federated.sampling import losing, sampler_of
from dpkernels.federated.smoothing import smoothed
from dpkernels.federated.softmax import SoftmaxProblem

_LARGEST_DELTA = 1e-5


@dataclass(frozen=True)
class Built:
    """Everything that a loop needs.

    options: those that were given, with the numbers that the data decides.
    total_declared: whether |D| is the number of records over the number of clients, so that the
        former is declared public.
    """

    options: Options
    data: FederatedData
    federation: Federation
    total_declared: bool

    @property
    def network(self) -> nn.Module | None:
        """The network that is trained, with the parameters that are handed out; None for others."""
        problem = self.federation.problem
        if not isinstance(problem, ModelProblem):
            return None
        problem.set(self.federation.model())
        return problem.model


def build(options: Options, journal: Path | None = None) -> Built:
    """Load the data, part it among clients, calibrate the noise.

    journal: of ``Federation``. Raises ValueError for options that do not fit the data.
    """
    data = data_of(options)
    # On a resumed run the number stands in the options already.
    total = len(data.y) / options.clients
    declared = options.records_per_client in (None, total)
    options = replace(options, records_per_client=options.records_per_client or total)
    options = replace(options, delta=_delta(options))
    partition = data.partition(options.partition, options.clients, options.partition_seed)
    public = None
    if options.public_inputs is not None:
        data, public = _with_public_inputs(data, options.public_inputs)
    problem = _problem(options, data, partition, public)
    terms = Terms(
        clients=options.clients,
        records=options.records_per_client or total,
        shape=problem.shape,
        rounds=options.rounds,
        unit=options.level,
        view=options.view,
        adjacency=options.adjacency,
    )
    federation = Federation(
        options.known.make(asdict(options), centre=options.centre),
        problem,
        terms,
        epsilon=options.budget,
        delta=options.delta or _LARGEST_DELTA,
        accountant=options.accountant,
        sampler=sampler_of(options.sampling, options.clients, options.seed),
        record_rate=options.record_rate,
        max_dropouts=options.max_dropouts,
        transport=losing(options.lose, options.seed) if options.lose else None,
        seed=options.seed,
        # A fixed seed repeats the rounds that were lost, noise and all.
        journal=journal if options.seed is None else None,
    )
    return Built(options, data, federation, declared)


def data_of(options: Options) -> FederatedData:
    """Return the data set, with what is held out as its test part, as it was declared public.

    Synthetic data is made for as many clients as there are.
    """
    if options.dataset == "synthetic":
        data = of_synthetic(clients=options.clients)
    else:
        data = load(options.dataset, options.data_dir)
    if options.validation is not None:
        if options.validation >= len(data.y):
            raise ValueError(
                f"validation must be 1 to {len(data.y) - 1}, fewer than the {len(data.y)} training "
                f"records, got {options.validation}"
            )
        data = holdout(data, options.validation)
    if options.smooth:
        data = smoothed(data, options.smooth)
    if options.statistic is not None:
        what, components = options.statistic
        features = data.x.shape[1]
        if components is not None and components > features:
            raise ValueError(
                f"public: {data.name} has {features} features, got pca:{components}; take "
                f"pca:{features} or fewer"
            )
        data = declared_public(data, what, components)
    return data


def _with_public_inputs(data: FederatedData, count: int) -> tuple[FederatedData, Tensor]:
    """Return the data with ``count`` records less in its test part, and the inputs of these."""
    if count >= len(data.y_test):
        raise ValueError(
            f"public_inputs must be 1 to {len(data.y_test) - 1}, fewer than the "
            f"{len(data.y_test)} test records, got {count}"
        )
    own = replace(data, x_test=data.x_test[count:], y_test=data.y_test[count:])
    return own, data.x_test[:count].unflatten(1, data.shape)


def _delta(options: Options) -> float:
    """Return delta, less than 1 / the public number of units."""
    records = options.records_per_client or 1.0
    units = options.clients * (records if options.level == "record" else 1.0)
    if options.delta is None:
        return min(_LARGEST_DELTA, 10.0 ** (math.ceil(-math.log10(units)) - 1))
    if options.delta * units >= 1 and options.budget is not None:
        raise ValueError(
            f"delta must be less than 1 / the number of {options.level}s, {1 / units:.2g}, got "
            f"{options.delta:g}: with more, publishing whole {options.level}s would be allowed"
        )
    return options.delta


def _problem(
    options: Options, data: FederatedData, partition: Partition, public: Tensor | None
) -> Problem:
    if options.model == "logistic":
        x, x_test = data.x, data.x_test
        if options.bias and not options.centre:
            x, x_test = (
                nn.functional.pad(part, (0, 1), value=options.bias) for part in (x, x_test)
            )
        return SoftmaxProblem(partition.of(x, data.y), x_test, data.y_test, classes=data.classes)
    return network_problem(options.model, data, partition, options.seed, public)


def network_problem(
    model: str,
    data: FederatedData,
    partition: Partition,
    seed: int | None,
    public: Tensor | None = None,
) -> ModelProblem:
    """Return the network ``model`` over the clients of ``partition``; seed: of its parameters.

    public: of ``ModelProblem``.
    """
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
    x, x_test = (part.unflatten(1, data.shape) for part in (data.x, data.x_test))
    if data.vocabulary is not None:
        x, x_test = x.long(), x_test.long()
    parts = [partition.indices(client) for client in range(partition.clients)]
    network = build_network(model, data)
    return ModelProblem(network, x, data.y, parts, x_test, data.y_test, public=public)
