"""The same history by dp-accounting: a second opinion, by other people's code."""

from __future__ import annotations

from collections.abc import Iterable

from dpkernels.privacy.accountants.accountant import check_delta
from dpkernels.privacy.accountants.exposure import exposure
from dpkernels.privacy.mechanism import NotPrivate, Statement, WithoutReplacement


def dp_accounting_epsilon(history: Iterable[tuple[Statement, int]], delta: float) -> float:
    """Return epsilon at ``delta`` of ``history`` as dp-accounting computes it.

    history: what was released and how often, as accountants keep it.

    By privacy loss distributions on a grid of 1e-4, or, for batches without replacement, which it
    has no others for, by Renyi divergences. Takes seconds: for the end of a run. Raises NotPrivate
    for statements without a guarantee.
    """
    import dp_accounting
    from dp_accounting import NeighboringRelation, pld, rdp

    check_delta(delta)
    runs = list(history)
    for statement, _ in runs:
        if statement.void is not None:
            raise NotPrivate(f"there is no epsilon: {statement.void}")
    exposed = exposure(runs)
    if exposed.is_nothing:
        return 0.0
    if exposed.mu == float("inf"):
        return exposed.mu
    fixed_size = any(isinstance(kind, WithoutReplacement) for (_, kind), _ in exposed.sampled)
    accountant = (
        rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        if fixed_size
        else pld.PLDAccountant()
    )
    if exposed.mu:
        accountant.compose(dp_accounting.GaussianDpEvent(1 / exposed.mu))
    for (sigma, sampling), steps in exposed.sampled:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        if isinstance(sampling, WithoutReplacement):
            event = dp_accounting.SampledWithoutReplacementDpEvent(
                sampling.population, sampling.batch, gaussian
            )
        else:
            event = dp_accounting.PoissonSampledDpEvent(sampling.rate, gaussian)
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))
