"""``merging``: FedFisher's server, 5 clients with K-FAC, against 2,000 steps of Adam in PyTorch.

Ours is the whole of ``merge``, checks included: 50 conjugate gradients, and as many as a Kronecker
preconditioner needs for the same objective. Adam's loop is timed over fewer steps and scaled up,
without what comes before it. Factors are made of numbers, with eigenvalues j^-1.5: the time does
not depend on them, how far the objective falls does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import markdown_table
from benchmarks.timing import Spread, interleave
from dpkernels.federated import Adam, ConjugateGradients, merge
from dpkernels.fisher import Fisher, Kronecker

_CPU = torch.device("cpu")
_CLIENTS, _ADAM_STEPS, _ITERATIONS = 5, 2000, 50
Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Case:
    """A network of layers ``[O, I]`` without biases; target: seconds for merging.

    steps: of Adam in a timed call. rounds: of all forms. trace: whether 2,000 steps are run once
        to see how far they come.
    """

    name: str
    shapes: Shapes
    target: float
    steps: int
    rounds: int
    trace: bool


# The networks of FedFisher's tables: LeNet for 1 x 28 x 28 and the CNN for 3 x 32 x 32.
LENET: Shapes = ((6, 25), (16, 150), (120, 256), (84, 120), (10, 84))
CNN: Shapes = ((32, 75), (64, 800), (512, 1600), (128, 512), (10, 128))
CASES = (Case("LeNet", LENET, 1.0, 100, 11, True), Case("CNN", CNN, 30.0, 4, 3, False))


@dataclass(frozen=True)
class Found:
    """One case.

    seconds: of 50 conjugate gradients, of preconditioned ones, and of 2,000 steps of Adam by both
        plain forms, by their names. ratio: the faster of these over the first.
    left: what is left of the objective after each, over that at the mean.
    iterations: of the preconditioned ones.
    """

    case: str
    weights: int
    target: float
    seconds: dict[str, Spread]
    ratio: Spread
    left: dict[str, float]
    iterations: int


OURS, PRECONDITIONED = "50 conjugate gradients", "preconditioned"
EINSUM, LONG = "Adam, einsum", "Adam, long products"


def clients(shapes: Shapes, seed: int = 0) -> tuple[list[dict[str, Tensor]], list[Fisher]]:
    """Return states, and Fishers whose eigenvalues are j^-1.5 in bases of their own."""
    generator = torch.Generator().manual_seed(seed)

    def factor(size: int) -> Tensor:
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
        eigenvalues: Tensor = torch.arange(1, size + 1) ** -1.5
        return torch.mm(basis * eigenvalues, basis.mT)

    states, fishers = [], []
    for _ in range(_CLIENTS):
        names = [(f"{index}.weight", shape) for index, shape in enumerate(shapes)]
        states.append(
            {name: 0.1 * torch.randn(o, i, generator=generator) for name, (o, i) in names}
        )
        layers = {name: Kronecker(name, None, factor(i), factor(o)) for name, (o, i) in names}
        fishers.append(Fisher(layers, {}, 1))
    return states, fishers


class AdamLoop:
    """The paper's server in PyTorch: the constant part of the gradient is computed once.

    ``einsum``: ``sum_i G_i X A_i`` as one contraction. ``long``: all G_i X as one product, which
    all A_i one below the other add up in a second. Steps by ``torch.optim.Adam``, fused.
    """

    def __init__(self, states: list[dict[str, Tensor]], fishers: list[Fisher], form: str) -> None:
        names = list(states[0])
        kept = [[f.layers[name] for f in fishers] for name in names]
        share = 1 / len(states)
        self.gs = [torch.stack([_kron(x).g * share for x in one]) for one in kept]
        self.as_ = [torch.stack([_kron(x).a for x in one]) for one in kept]
        stacks = [torch.stack([state[name] for state in states]) for name in names]
        constants = zip(self.gs, stacks, self.as_, strict=True)
        self.constants = [-torch.bmm(torch.bmm(g, w), a).sum(0) for g, w, a in constants]
        self.weights = [stack.mean(0).requires_grad_() for stack in stacks]
        self.form = form
        self.optimizer = torch.optim.Adam(
            self.weights, lr=0.01, betas=(0.9, 0.99), eps=0.01, fused=True
        )

    def step(self) -> None:
        """Make one step."""
        for g, a, x, constant in zip(self.gs, self.as_, self.weights, self.constants, strict=True):
            weights = x.detach()
            if self.form == EINSUM:
                # Fused Adam reads a gradient as if it had the weights' strides.
                total = torch.einsum("nop,pi,nij->oj", g, weights, a)
                x.grad = total.add_(constant).contiguous()
            else:
                halves = torch.mm(g.flatten(0, 1), weights).unflatten(0, g.shape[:2])
                x.grad = torch.addmm(constant, halves.transpose(0, 1).flatten(1), a.flatten(0, 1))
        self.optimizer.step()


def _kron(layer: object) -> Kronecker:
    assert isinstance(layer, Kronecker)
    return layer


def preconditioned_to(states: list[dict[str, Tensor]], fishers: list[Fisher], value: float) -> int:
    """Return how many preconditioned iterations bring the objective to ``value`` or below."""
    solver = ConjugateGradients(_ITERATIONS, 0.0, "kronecker")
    values = merge(states, fishers, solver=solver).values
    return next((step for step, x in enumerate(values) if x <= value), len(values) - 1)


def compare(case: Case) -> Found:
    """Time all forms in turn."""
    states, fishers = clients(case.shapes)
    plain = ConjugateGradients(_ITERATIONS, tolerance=0.0)
    values = merge(states, fishers, solver=plain).values
    iterations = max(1, preconditioned_to(states, fishers, values[-1]))
    fewer = replace(plain, iterations=iterations, preconditioner="kronecker")
    loops = {name: AdamLoop(states, fishers, name) for name in (EINSUM, LONG)}

    def run(loop: AdamLoop) -> None:
        for _ in range(case.steps):
            loop.step()

    calls: list[Callable[[], object]] = [
        lambda: merge(states, fishers, solver=plain),
        lambda: merge(states, fishers, solver=fewer),
        lambda: run(loops[EINSUM]),
        lambda: run(loops[LONG]),
    ]
    interleave(calls, 1, _CPU)
    times = interleave(calls, case.rounds, _CPU)
    scales = (1.0, 1.0, _ADAM_STEPS / case.steps, _ADAM_STEPS / case.steps)
    scaled = [[t * x / 1e3 for t in one] for one, x in zip(times, scales, strict=True)]
    ours, _, einsum, long = scaled
    ratio = [min(a, b) / t for a, b, t in zip(einsum, long, ours, strict=True)]
    fallen = merge(states, fishers, solver=fewer).values
    left = {OURS: values[-1] / values[0], PRECONDITIONED: fallen[-1] / fallen[0]}
    if case.trace:
        steps = merge(states, fishers, solver=Adam(_ADAM_STEPS)).values
        left[EINSUM] = steps[-1] / steps[0]
    names = (OURS, PRECONDITIONED, EINSUM, LONG)
    seconds = {name: Spread.of(one) for name, one in zip(names, scaled, strict=True)}
    weights = sum(o * i for o, i in case.shapes)
    return Found(case.name, weights, case.target, seconds, Spread.of(ratio), left, iterations)


def run(cases: tuple[Case, ...] = CASES) -> list[dict[str, Any]]:
    """Return all cases."""
    found = []
    for case in cases:
        found.append(asdict(compare(case)))
        print(table(found[-1:]), flush=True)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each case; in brackets what is left of the objective."""
    header = [
        "model",
        f"{OURS}, s",
        f"{PRECONDITIONED}, s",
        f"{EINSUM}, s",
        f"{LONG}, s",
        "Adam over ours",
    ]
    rows = []
    for one in found:
        cells = []
        for name, spread in one["seconds"].items():
            left = one["left"].get(name)
            cells.append(f"{spread['median']:.3g}" + (f" ({left:.3g})" if left else ""))
        verdict = "met" if one["seconds"][OURS]["median"] < one["target"] else "MISSED"
        cells[0] += f", target {one['target']:g}: {verdict}"
        cells[1] += f", {one['iterations']} iterations"
        ratio = f"{one['ratio']['median']:.3g}"
        rows.append([f"{one['case']}, {one['weights']:,} weights", *cells, ratio])
    return markdown_table(header, rows)
