"""What anybody can compute of a released model: probes in the shape of records, and K-FAC of them.

Probes are synthetic, so nothing here tells of a record: it is post-processing of the parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dpkernels.engine.sides import IDENTITY, FixedSides
from dpkernels.federated.model import ModelProblem
from dpkernels.precondition.kfac import Kfac
from dpkernels.precondition.probes import ColouredNoise, Features, Probe

_SEED = 0  # of the probes, which are public
_COUNT = 512


def probe_of(problem: ModelProblem) -> Probe:
    """Return noise with the spectrum of images for ``[C, H, W]``, Gaussian features for ``[d]``.

    Raises ValueError for records of another shape.
    """
    shape = problem.record_shape
    x = torch.zeros(1, *shape, dtype=problem.initial().dtype)
    training = problem.model.training
    with torch.no_grad():
        classes = problem.model.eval()(x).shape[-1]
    problem.model.train(training)
    if len(shape) == 3:
        return ColouredNoise(shape, classes=classes)
    if len(shape) == 1:
        return Features(shape[0], classes)
    raise ValueError(
        f"FedFisher: probes stand in for images [C, H, W] or features [d], got records of shape "
        f"{list(shape)}; take factors 'public' or 'none'"
    )


def probe_inputs(problem: ModelProblem, count: int = _COUNT) -> Tensor:
    """Return inputs of ``count`` probes, always the same ones."""
    inputs, _ = probe_of(problem).batch(count, torch.Generator().manual_seed(_SEED))
    return inputs[0]


def kfac_at(problem: ModelProblem, theta: Tensor) -> FixedSides:
    """Return DP-KFC's preconditioner at ``theta``, ``[D]``, from probes: ``precondition.Kfac``."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="sum")

    model = problem.model_at(theta)
    kfac = Kfac(model, probe_of(problem), loss, batches=2, seed=_SEED)
    found = {name: kfac.sides(name) for name, _ in model.named_modules()}
    return FixedSides({name: sides for name, sides in found.items() if sides != IDENTITY})
