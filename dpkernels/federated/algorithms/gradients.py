"""Private gradients of clients: what FedGD, FedSOFIM and FedFC upload."""

from __future__ import annotations

from torch import Tensor

from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Query, Terms, Visit
from dpkernels.federated.problem import FLOAT32_RECORDS

_UNIT = 2.0**-24

# A client's sum is projected to this many times |D| records' bound, so that its last rounding is
# bounded whatever the client has. A client with fewer records never gets there.
MOST = 4.0


def summed(bound: float, terms: Terms) -> float:
    """Return how far a record clipped to ``bound`` moves a client's sum over |D|, rounding too.

    Without one record the others are added up in another order, and float32 rounds otherwise. With
    u = 2^-24, an element of a sum of n products, in any order, errs by at most (n + 1) u of the sum
    of absolute terms, so the whole by at most (n + 1) u n ``bound``, and scaling by a few u more (7
    are allowed for); in either world. That is for n <= ``FLOAT32_RECORDS``. Larger clients add up
    in float64 (2^-20 covers 10^5 records) and round once, by u of what they round, which the
    projection keeps to ``MOST`` |D| ``bound``.
    """
    others = 2 * FLOAT32_RECORDS * (FLOAT32_RECORDS + 8) * _UNIT + 2.0**-20
    return bound * ((1 + others) / terms.records + 2 * MOST * _UNIT)


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
        most = MOST * terms.records
        return problem.clipped_gradient_sums(cohort, theta, clip, most).div_(terms.records)
    return clip_rows(problem.gradient_sums(cohort, theta).div_(terms.records), clip)
