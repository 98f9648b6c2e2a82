"""The mean of the last iterates: post-processing that takes noise out of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.federated.contract import Tensors


def check_average(name: str, average: float) -> None:
    """Raise ValueError unless ``average`` is a share of the rounds."""
    if not 0 <= average <= 1:
        raise ValueError(f"{name}: average must be a share of the rounds in [0, 1], got {average}")


def start_average(theta: Tensor, average: float) -> Tensors:
    """Return what the server keeps for the mean; nothing for ``average`` = 0."""
    if not average:
        return {}
    return {"sum": torch.zeros_like(theta, dtype=torch.float64), "steps": torch.zeros(2)}


def add_iterate(server: Tensors, theta: Tensor, average: float, rounds: int) -> Tensors:
    """Return the sum after an iterate, of which the last ``average * rounds`` count."""
    if not average:
        return {}
    taken, counted = server["steps"].tolist()
    if taken < rounds - round(average * rounds):
        return {"sum": server["sum"], "steps": torch.tensor([taken + 1, counted])}
    return {"sum": server["sum"] + theta, "steps": torch.tensor([taken + 1, counted + 1])}


def averaged(server: Tensors) -> Tensor:
    """Return the mean of the iterates that counted, or the last one if none did yet."""
    theta = server["theta"]
    if "sum" not in server or server["steps"][1] == 0:
        return theta
    return (server["sum"] / server["steps"][1]).to(theta.dtype)
