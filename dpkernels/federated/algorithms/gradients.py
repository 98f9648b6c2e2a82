"""Private gradients of clients: what FedGD, FedSOFIM and FedFC upload."""

from __future__ import annotations

from torch import Tensor

from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Query, Terms, Visit

# A float32 sum over n records rounds differently without one of them: by about n 2^-23 of a
# record's bound (measured: 1e-4 at 1,000 records, 2.5e-3 at 20,000). Records that conspire can do
# worse, up to n^2 2^-24; float64 features leave nothing of either.
_ROUNDING = 2.0**-23


def summed(bound: float, terms: Terms) -> float:
    """Return how far a record clipped to ``bound`` moves a client's sum over |D|, rounding too."""
    return bound * (1 / terms.records + _ROUNDING)


def gradient_query(terms: Terms, clip: float) -> Query:
    """Return what ``client_gradients`` releases, and how far a unit moves it.

    A record more or less moves the sum of clipped gradients by at most ``clip``; a user more or
    less moves the sum of clipped means by at most ``clip``.
    """
    return Query(terms.shape, summed(clip, terms) if terms.unit == "record" else clip)


def client_gradients(visit: Visit, theta: Tensor, clip: float) -> Tensor:
    """Return each client's gradient at ``theta``, ``[k, *shape]``, before the noise.

    Unit record: the sum of records' gradients clipped to ``clip``, over |D|. Unit user: the sum
    over |D|, clipped to ``clip`` as a whole.
    """
    terms, problem, cohort = visit.terms, visit.problem, visit.cohort
    if terms.unit == "record":
        return problem.clipped_gradient_sums(cohort, theta, clip).div_(terms.records)
    return clip_rows(problem.gradient_sums(cohort, theta).div_(terms.records), clip)
