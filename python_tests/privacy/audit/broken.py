"""Steps of the engine as they are, and with one mistake each: what an observer sees of them.

Each function returns ``release(present)``: one step on the worst neighbours that we know, with or
without the record. All claim noise ``SIGMA`` times the clipping norm ``NORM`` on whatever is seen.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import dpkernels
from dpkernels.engine.clipping import Clipping, Flat, PerLayer, SampleNorms
from dpkernels.ops.factor import Diagonal
from dpkernels.precondition import FixedSides, Preconditioner, Sides

SIGMA = 1.0
NORM = 0.5

Release = Callable[[bool], Tensor]
# Gradients of the one layer are the inputs themselves, far longer than NORM; the record's is
# orthogonal to half of each of the others'.
OTHERS = torch.tensor([[3.0, 3.0, 0.0, 0.0]]).repeat(8, 1)
RECORD = torch.tensor([[0.0, 30.0, 0.0, 0.0]])


def private(
    model: nn.Module,
    clipping: Clipping,
    key: dpkernels.NoiseKey | None = None,
    preconditioner: Preconditioner | None = None,
) -> dpkernels.PrivateTraining:
    """Return private training that stays where it is: the learning rate is 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fixed seed
        return dpkernels.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            noise_multiplier=SIGMA,
            max_grad_norm=clipping,
            expected_batch_size=1.0,
            loss_reduction="sum",
            preconditioner=preconditioner,
            noise_key=key or dpkernels.NoiseKey.from_seed(0),
        )


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1, bias=False))


def batch(present: bool, others: Tensor = OTHERS) -> Tensor:
    return torch.cat([others, RECORD]) if present else others


def noisy_sum(training: dpkernels.PrivateTraining, *microbatches: Tensor) -> Tensor:
    """Return what a step on these microbatches releases, flat."""
    for inputs in microbatches:
        training.model(inputs).sum().backward()
    training.optimizer.step()
    return torch.cat([p.grad.flatten() for p in training.model.parameters()])


def of_step(training: dpkernels.PrivateTraining) -> Release:
    return lambda present: noisy_sum(training, batch(present))


def two_microbatches() -> Release:
    training = private(one_layer(), Flat(NORM))
    return lambda present: noisy_sum(training, OTHERS[:4], batch(present, OTHERS[4:]))


def half_the_noise() -> Release:
    training = private(one_layer(), Flat(NORM))
    step = training._step
    step.mechanism = dataclasses.replace(step.mechanism, noise_multiplier=SIGMA / 2)
    return of_step(training)


class Unclipped(Flat):
    """Says that it clips."""

    def factors(self, norms: SampleNorms, dtype: torch.dtype) -> Tensor:
        return torch.full_like(norms.sq_norms[0], norms.scale, dtype=dtype)


def no_clip() -> Release:
    return of_step(private(one_layer(), Unclipped(NORM)))


def each_microbatch() -> Release:
    """Every microbatch's sum is seen, each with noise of its own."""
    training = private(one_layer(), Flat(NORM))

    def release(present: bool) -> Tensor:
        sums = [noisy_sum(training, x) for x in (OTHERS[:4], batch(present, OTHERS[4:]))]
        return torch.cat(sums)

    return release


def each_microbatch_with_the_same_noise() -> Release:
    """The key is set back for every microbatch."""
    training = private(one_layer(), Flat(NORM))

    def release(present: bool) -> Tensor:
        before = training.noise_key.state_dict()
        first = noisy_sum(training, OTHERS[:4])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training.noise_key.load_state_dict(before)
        return torch.cat([first, noisy_sum(training, batch(present, OTHERS[4:]))])

    return release


def of_ranks(keys: list[dpkernels.NoiseKey]) -> Release:
    ranks = [private(one_layer(), Flat(NORM), key) for key in keys]

    def release(present: bool) -> Tensor:
        parts = (OTHERS[:4], batch(present, OTHERS[4:]))
        return torch.cat([noisy_sum(rank, x) for rank, x in zip(ranks, parts, strict=True)])

    return release


def each_rank() -> Release:
    """Every rank's upload is seen, each with noise of its own."""
    return of_ranks(seeded().spawn(2))


def each_rank_with_the_same_seed() -> Release:
    return of_ranks([seeded(), seeded()])


def seeded() -> dpkernels.NoiseKey:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpkernels.NoiseKey.from_seed(0)


def four_layers() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    for layer in model:
        nn.init.eye_(layer.weight)  # so that the record's gradient is long in every layer
    return model


def per_layer() -> Release:
    return of_step(private(four_layers(), PerLayer(NORM)))


class NoiseForFlat(PerLayer):
    """Clips every layer to NORM, and has noise for NORM over all of them."""

    def sensitivity(self, layers: tuple[str, ...]) -> float:
        return NORM


def per_layer_with_noise_for_flat() -> Release:
    return of_step(private(four_layers(), NoiseForFlat({str(i): NORM for i in range(4)})))


def inverse_root(inputs: Tensor) -> Sides:
    return Sides(right=Diagonal((inputs.square().mean(0) + 0.1).rsqrt()))


def public_preconditioner() -> Release:
    return of_step(
        private(one_layer(), Flat(NORM), preconditioner=FixedSides({"0": inverse_root(OTHERS)}))
    )


class FromTheBatch:
    """Second moments of the inputs of the step itself.

    The record is large where the others are not: its second moments turn the others' gradients,
    which are clipped afterwards, so that each of them moves by half of NORM.
    """

    def __init__(self) -> None:
        self.current = Sides()

    def sides(self, layer: str) -> Sides:
        return self.current


def preconditioner_from_the_batch() -> Release:
    preconditioner = FromTheBatch()
    training = private(one_layer(), Flat(NORM), preconditioner=preconditioner)

    def release(present: bool) -> Tensor:
        inputs = batch(present)
        preconditioner.current = inverse_root(inputs)
        return noisy_sum(training, inputs)

    return release


SOUND = [two_microbatches, each_microbatch, each_rank, per_layer, public_preconditioner]
BROKEN = [
    half_the_noise,
    no_clip,
    each_microbatch_with_the_same_noise,
    each_rank_with_the_same_seed,
    per_layer_with_noise_for_flat,
    preconditioner_from_the_batch,
]
