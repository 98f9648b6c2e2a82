"""What must go together before a federation begins."""

from __future__ import annotations

from dpkernels.federated.contract import Terms
from dpkernels.federated.problem import Problem
from dpkernels.privacy.private_sampler import PrivateSampler
from dpkernels.privacy.samplers import ShuffledSampler


def check_fits(problem: Problem, terms: Terms, sampler: PrivateSampler | None) -> None:
    """Raise ValueError unless problem, terms and sampler speak of the same clients and model."""
    if problem.clients != terms.clients:
        raise ValueError(
            f"Federation: terms must have the problem's {problem.clients} clients, got "
            f"{terms.clients}"
        )
    if tuple(problem.shape) != tuple(terms.shape):
        raise ValueError(
            f"Federation: terms must have the shape of the problem's parameters, "
            f"{list(problem.shape)}, got {list(terms.shape)}"
        )
    if sampler is not None and sampler.num_records != terms.clients:
        raise ValueError(
            f"Federation: sampler must draw from {terms.clients} clients, got {sampler.num_records}"
        )


def check_last_cohort(sampler: PrivateSampler | None, required: int) -> None:
    """Raise ValueError where the last cohort of a shuffled epoch could never be released."""
    if not isinstance(sampler, ShuffledSampler) or sampler.drop_last:
        return
    last = sampler.num_records % sampler.batch_size or sampler.batch_size
    if last < required:
        raise ValueError(
            f"Federation: every cohort must have the {required} clients that 'aggregate' needs, "
            f"but the last of an epoch has {last}; take a cohort size that divides the "
            f"{sampler.num_records} clients, or drop_last=True"
        )
