"""Who takes part in a round, as a command line says it: all, poisson:0.1, fixed:10, shuffled:10."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from dpkernels.federated.loop import Transport
from dpkernels.federated.received import Message
from dpkernels.privacy.draws import Bits, each_with_probability
from dpkernels.privacy.mechanism import Adjacency, EveryRecord, Poisson, View, adjacency_of
from dpkernels.privacy.private_sampler import PrivateSampler
from dpkernels.privacy.samplers import FixedSizeSampler, PoissonSampler, ShuffledSampler

# Clients, seed -> who is drawn; None if all take part.
Draw = Callable[[int, int | None], PrivateSampler | None]


def _poisson(number: str) -> Draw:
    rate = float(number)
    return lambda clients, seed: PoissonSampler(clients, rate, seed=seed)


def _fixed(number: str) -> Draw:
    size = int(number)
    return lambda clients, seed: FixedSizeSampler(clients, size, seed=seed)


def _shuffled(number: str) -> Draw:
    size = int(number)
    # Without a last, smaller cohort: noise shares are for cohorts of one size.
    return lambda clients, seed: ShuffledSampler(clients, size, drop_last=True, seed=seed)


SAMPLINGS: dict[str, Callable[[str], Draw]] = {
    "poisson": _poisson,
    "fixed": _fixed,
    "shuffled": _shuffled,
}
NAMED = "all, poisson:0.1, fixed:10, shuffled:10"


def sampler_of(spec: str, clients: int, seed: int | None = None) -> PrivateSampler | None:
    """Return what draws the clients of a round; None for ``all``.

    Raises ValueError for a name that is not known, or a number that is missing or out of range.
    """
    if spec == "all":
        return None
    name, _, number = spec.partition(":")
    try:
        return SAMPLINGS[name](number)(clients, seed)
    except (KeyError, ValueError) as error:
        why = "" if isinstance(error, KeyError) else f" ({error})"
        raise ValueError(
            f"sampling must be one of {NAMED}, with numbers that fit {clients} clients, got "
            f"{spec!r}{why}"
        ) from None


def default_adjacency(
    spec: str, clients: int, *, unit: str, view: View, record_rate: float
) -> Adjacency:
    """Return what neighbours are if nothing is said.

    A record more or less. A user more or less, or another user in its place where each upload is
    seen, or the number of clients in a round is fixed.
    """
    if unit == "record" and record_rate < 1:
        return adjacency_of(Poisson(record_rate), unit=unit, view=view, sampled="records")
    sampler = sampler_of(spec, clients)
    sampling = EveryRecord() if sampler is None else sampler.sampling
    return adjacency_of(sampling, unit=unit, view=view, sampled="clients")


def losing(rate: float, seed: int | None) -> Transport:
    """Return a network that loses each upload with probability ``rate``, by itself."""

    def transport(index: int, ids: Tensor, uploads: Tensor) -> Iterator[Message]:
        bits = Bits() if seed is None else Bits(f"{seed}/lost/{index}")
        for row in each_with_probability(1 - rate, len(ids), bits).tolist():
            yield Message(int(ids[row]), index, uploads[row])

    return transport
