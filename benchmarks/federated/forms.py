"""Every form of a round by algorithm: ours, the per-client loops, and batched PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.federated import batched, ours, solvers
from benchmarks.federated.batched import BatchedGradients
from benchmarks.federated.loops import ClientLoop, GradientLoop, NewtonLoop, Solver
from benchmarks.federated.workload import Size
from dpkernels.federated import FedGD, FedNew, FedSOFIM, SoftmaxProblem

# Of a model after two rounds without noise, relative to its largest entry. The loop's conjugate
# gradients stop at the whole tolerance, 1e-4, and ours at half of it.
_AGREEMENT = {"FedGD": 1e-5, "FedSOFIM": 1e-5, "FedNew-cg": 1e-3, "FedNew-exact": 1e-4}


@dataclass(frozen=True)
class Form:
    """A way to compute a round: ``make(x, labels, size, std)`` gives a loop to call."""

    name: str
    make: Callable[[Tensor, Tensor, Size, float], ClientLoop]


def loops(algorithm: str) -> list[Form]:
    """Return the per-client loops of that algorithm."""
    made = ours.ALGORITHMS[algorithm]
    if isinstance(made, FedNew):
        found = solvers.CG if made.hessian == "cg" else solvers.EXACT
        return [Form(name, _newton(made, solver)) for name, solver in found.items()]
    assert isinstance(made, FedGD | FedSOFIM)
    return [Form("loop", lambda x, y, size, std: GradientLoop(made, x, y, size, std))]


def batched_form(algorithm: str) -> Form:
    """Return the form with one ``bmm`` over all clients."""
    made = ours.ALGORITHMS[algorithm]
    if isinstance(made, FedNew):
        solver = batched.conjugate_gradients if made.hessian == "cg" else batched.exact
        return Form("batched", _newton(made, solver))
    assert isinstance(made, FedGD | FedSOFIM)
    return Form("batched", lambda x, y, size, std: BatchedGradients(made, x, y, size, std))


def _newton(made: FedNew, solver: Solver) -> Callable[[Tensor, Tensor, Size, float], ClientLoop]:
    return lambda x, y, size, std: NewtonLoop(made, x, y, size, std, solver)


def check(algorithm: str, x: Tensor, labels: Tensor, size: Size, problem: SoftmaxProblem) -> None:
    """Raise ValueError unless every form gives our model after two rounds without noise."""
    federation = ours.federation(algorithm, problem, size, private=False)
    federation.round()
    federation.round()
    wanted = federation.model()
    for form in (*loops(algorithm), batched_form(algorithm)):
        loop = form.make(x, labels, size, 0.0)
        loop()
        loop()
        difference = (loop.server.theta - wanted).abs().max() / wanted.abs().max()
        if not torch.isfinite(difference) or difference > _AGREEMENT[algorithm]:
            raise ValueError(
                f"{algorithm}, {form.name}: the model after two rounds must be ours within "
                f"{_AGREEMENT[algorithm]:g}, got a difference of {difference:.2g}"
            )
