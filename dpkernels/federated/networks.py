"""The networks that ``dpkernels federate`` knows by name, sized for a data set."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from dpkernels.federated import models
from dpkernels.federated.data import TOKENS, FederatedData
from dpkernels.train.models import cnn, logistic


def _mlp(data: FederatedData) -> nn.Module:
    return models.mlp(math.prod(data.shape), data.classes)


def _of_images(
    name: str, network: Callable[[int], nn.Module], shape: tuple[int, ...], datasets: str
) -> Callable[[FederatedData], nn.Module]:
    """Return what makes ``network`` for data of ``shape``, and refuses other data."""

    def made(data: FederatedData) -> nn.Module:
        if data.shape != shape:
            raise ValueError(
                f"model: {name} takes images {list(shape)}, got {data.name} with inputs of shape "
                f"{list(data.shape)}; take {datasets}, or --model cnn"
            )
        return network(data.classes)

    return made


def _lstm(data: FederatedData) -> nn.Module:
    if data.vocabulary is None:
        raise ValueError(f"model: lstm takes tokens, got {data.name}; take imdb, or --model mlp")
    return models.lstm(data.vocabulary, data.classes)


NETWORKS: dict[str, Callable[[FederatedData], nn.Module]] = {
    "cnn": lambda data: cnn(data.shape, data.classes),
    "mlp": _mlp,
    "lenet5": _of_images("lenet5", models.lenet5, (3, 32, 32), "cifar10"),
    "lenet": _of_images("lenet", models.lenet, (1, 28, 28), "fashion or mnist"),
    "cnn5x5": _of_images("cnn5x5", models.cnn5x5, (3, 32, 32), "cifar10"),
    "lstm": _lstm,
    "softmax": lambda data: logistic(data.shape, data.classes),
}


def build(name: str, data: FederatedData) -> nn.Module:
    """Return the network, with fresh parameters from torch's generator.

    Raises ValueError for one that cannot take the inputs of ``data``.
    """
    return NETWORKS[name](data)


def check_inputs(dataset: str, model: str) -> None:
    """Raise ValueError where one of them is of tokens and the other is not."""
    if (dataset in TOKENS) != (model == "lstm"):
        wanted = "--model lstm" if dataset in TOKENS else f"--dataset {', '.join(sorted(TOKENS))}"
        raise ValueError(
            f"model: tokens go with lstm, got {model} for {dataset}; take {wanted}, or another of "
            "both"
        )
