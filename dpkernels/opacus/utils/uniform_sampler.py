"""Poisson samplers under Opacus' names."""

from __future__ import annotations

import torch

from dpkernels.privacy.samplers import PoissonSampler


class UniformWithReplacementSampler(PoissonSampler):
    """Batches that hold each of ``num_samples`` records with probability ``sample_rate``.

    generator: its seed, with a warning; from the operating system's entropy if None.
    steps: batches of an epoch, 1 / sample_rate if None.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(num_samples, sample_rate, steps=steps, seed=seed_of(generator))
        self.num_samples, self.sample_rate = num_samples, sample_rate


class DistributedUniformWithReplacementSampler(PoissonSampler):
    """The same over all processes: each samples its own share of ``total_size`` records.

    Every process has as many batches, empty ones included, so that none waits for another.
    shuffle, shuffle_seed: as Opacus takes them; which records are whose does not matter.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        shuffle: bool = True,
        shuffle_seed: int = 0,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            total_size,
            sample_rate,
            steps=steps,
            seed=seed_of(generator),
            rank=torch.distributed.get_rank(),
            world_size=torch.distributed.get_world_size(),
        )
        self.total_size, self.sample_rate = total_size, sample_rate

    @property
    def num_samples(self) -> int:
        """How many of the records are this process' own."""
        shared, left = divmod(self.total_size, self.world_size)
        return shared + (self.rank < left)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: batches of all epochs are independent."""


def seed_of(generator: torch.Generator | None) -> int | None:
    """Draw a seed from a generator, which cannot drive ours itself; None without a generator.

    Drawn, so that the generator's state decides: two draws from one generator are different seeds,
    and the same noise, or the same batches, do not come twice.
    """
    if generator is None:
        return None
    draw = torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device)
    return int(draw)
