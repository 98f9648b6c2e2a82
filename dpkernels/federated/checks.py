"""What must go together before a federation begins."""

from __future__ import annotations

from collections.abc import Sequence

from dpkernels.federated.contract import Algorithm, Stage, Tensors, Terms
from dpkernels.federated.problem import Problem
from dpkernels.federated.release import Release
from dpkernels.privacy.mechanism import WithoutReplacement
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


def check_budget(algorithm: Algorithm, epsilon: float | None, multiplier: float | None) -> None:
    """Raise ValueError for a budget where no noise would bound what a unit tells."""
    asked = {"epsilon": epsilon, "noise_multiplier": multiplier}
    for name, value in asked.items():
        if value is not None and not algorithm.private:
            raise ValueError(
                f"Federation: {name} must be None for {algorithm!r}, which is not private: nothing "
                f"bounds what one record changes, whatever the noise, got {value}; take settings "
                "that are private, or run without a guarantee"
            )


def check_central(algorithm: Algorithm, stages: Sequence[Stage], release: Release) -> None:
    """Raise ValueError where noise is added to the sum, and somebody looks at parts of it."""
    if release.central and any(not stage.uploaded for stage in stages):
        raise ValueError(
            f"{algorithm.name}: its clients upload what they make of their noisy releases, but "
            "with Poisson sampling under 'aggregate' the noise is added to the sum of uploads; "
            "draw a fixed number of clients, or take view 'each_upload'"
        )
    if release.central and algorithm.reads_uploads():
        raise ValueError(
            f"{algorithm.name}: its server takes single uploads, which have no noise with "
            "Poisson sampling under 'aggregate': it is added to their sum; draw a fixed number "
            "of clients, or take view 'each_upload'"
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


def check_state(name: str, kept: Tensors, release: Release) -> None:
    """Raise ValueError where what clients keep would tell who took part, and that must be secret.

    Of a fixed number of clients, one that was in a round is one less place for others. State that
    remembers a client's rounds moves its later uploads, so these tell of others' rounds, and a
    draw without replacement does not amplify any more. Under Poisson sampling clients are drawn by
    themselves: what one remembers tells of nobody else, and its own upload is clipped.
    """
    secret = isinstance(release.sampling, WithoutReplacement) and release.terms.unit == "user"
    if kept and secret and release.terms.view == "aggregate":
        raise ValueError(
            f"{name}: its clients keep state that remembers which rounds they were in, and a fixed "
            "number of clients is amplified as if nobody did; draw clients by Poisson sampling or "
            "shuffle them, let all take part, or take view 'each_upload'"
        )
