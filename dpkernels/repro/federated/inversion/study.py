"""The attack on every method: eight clients of one round of ten, one record each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpkernels.federated.model import ModelProblem
from dpkernels.federated.problem import LocalSGD
from dpkernels.repro.federated.inversion.attack import Recovered, invert, label_of, mse, psnr
from dpkernels.repro.federated.inversion.lenet import lenet
from dpkernels.repro.federated.inversion.uploads import METHODS, RATE, Method, Round, noise_std
from dpkernels.repro.federated.inversion.uploads import seen as uploads_of
from dpkernels.train.data import PIXELS, Data

# The paper attacks CIFAR-10's 25, 50 and 100.
TARGETS = (25, 50, 100, 125, 150, 175, 200, 225)
_OTHERS = (250, 275)
CLIENTS = len(TARGETS) + len(_OTHERS)
DRAWS = 50  # of every client's noise, to count labels: 500 uploads, a deviation of about 2%


@dataclass(frozen=True)
class Effort:
    """What an attacker spends on one image."""

    iterations: int = 300
    restarts: int = 2
    known_label: bool = False


@dataclass(frozen=True)
class Cell:
    """One method at one sigma: a figure for each image.

    sigma: None without noise. std: of each element's noise.
    psnr, mse: of pixels in [0, 1]. loss: what the attacker sees of success.
    label: whether the attack found it. label_rate: how often ``label_of`` does, of uploads of all
        clients with noise drawn anew.
    seconds: of the processor. images: ``[n, C, H, W]`` in [0, 1]; not for JSON.
    """

    dataset: str
    method: str
    sigma: float | None
    std: float
    psnr: list[float]
    mse: list[float]
    loss: list[float]
    label: list[bool]
    label_rate: float
    seconds: float
    images: Tensor = field(repr=False, compare=False)


@dataclass(frozen=True)
class Scene:
    """One data set's round, and the images behind it.

    originals: ``[n, C, H, W]`` in [0, 1]. blind: PSNR of the mean colour, for who sees nothing.
    """

    name: str
    originals: Tensor
    blind: list[float]
    cells: list[Cell]


def _pixels(data: Data, x: Tensor) -> Tensor:
    """Return inputs ``[..., C, H, W]`` as pixels, cut off at 0 and 1 as any attacker would."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in PIXELS[data.name])
    return (x * std + mean).nan_to_num(0.5).clamp(0.0, 1.0)


def conduct(
    data: Data,
    sigmas: Sequence[float],
    effort: Effort,
    *,
    targets: int = len(TARGETS),
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Scene:
    """Attack the first ``targets`` clients by every method, with every sigma where it has noise.

    Each client takes one SGD step on its record, w - theta = -eta gradient, as ``ModelProblem``
    takes it for every algorithm.
    """
    rows = torch.tensor([*TARGETS, *_OTHERS])
    x, y = data.train.x[rows], data.train.y[rows]
    model = lenet(data.shape, data.classes, seed)
    problem = ModelProblem(model, x, y, list(torch.arange(CLIENTS).split(1)), x, y)
    everybody, theta = torch.arange(CLIENTS), problem.initial()
    step = LocalSGD(epochs=1, batch_size=1, lr=RATE)
    updates = problem.local_updates(problem.cohort(everybody), theta, step, everybody)
    made = Round(theta, problem.layers, updates)
    problem.set(theta)
    originals = _pixels(data, x[:targets])
    blind = [
        psnr(_pixels(data, torch.zeros_like(one)), original)
        for one, original in zip(x, originals, strict=False)
    ]
    cells = []
    for index, (method, sigma) in enumerate(_asked(sigmas)):
        start = time.process_time()
        sent = uploads_of(method, made, sigma, seed + 1 + index)[:targets]
        found = [_attack(model, one, data, effort, seed + n) for n, one in enumerate(sent)]
        images = _pixels(data, torch.stack([one.image for one in found]))
        cells.append(
            Cell(
                data.name,
                method.name,
                sigma if method.noisy else None,
                noise_std(method, sigma, CLIENTS),
                [psnr(*pair) for pair in zip(images, originals, strict=True)],
                [mse(*pair) for pair in zip(images, originals, strict=True)],
                [one.loss for one in found],
                [one.label == int(label) for one, label in zip(found, y, strict=False)],
                _label_rate(model, made, y, method, sigma, seed + 1000 * (1 + index)),
                time.process_time() - start,
                images,
            )
        )
        report(_line(cells[-1]))
    return Scene(data.name, originals, blind, cells)


def _asked(sigmas: Sequence[float]) -> Iterator[tuple[Method, float]]:
    """Yield methods without noise once, at the first sigma's threshold, others with every sigma."""
    yield from ((method, sigmas[0]) for method in METHODS if not method.noisy)
    yield from ((method, sigma) for sigma in sigmas for method in METHODS if method.noisy)


def _attack(
    model: torch.nn.Module, update: Tensor, data: Data, effort: Effort, seed: int
) -> Recovered:
    gradient = -update / RATE
    return invert(
        model,
        gradient,
        data.shape,
        data.classes,
        iterations=effort.iterations,
        restarts=effort.restarts,
        label=label_of(model, gradient) if effort.known_label else None,
        seed=seed,
    )


def _label_rate(
    model: torch.nn.Module, made: Round, y: Tensor, method: Method, sigma: float, seed: int
) -> float:
    draws = DRAWS if method.noisy else 1
    found = [
        label_of(model, -update) == int(label)
        for draw in range(draws)
        for update, label in zip(uploads_of(method, made, sigma, seed + draw), y, strict=True)
    ]
    return sum(found) / len(found)


def _line(cell: Cell) -> str:
    noise = "" if cell.sigma is None else f", sigma {cell.sigma:g}"
    mean = sum(cell.psnr) / len(cell.psnr)
    return f"{cell.dataset}: {cell.method}{noise}: {mean:.1f} dB, {cell.seconds:.0f} s"
