"""What a federation keeps from one process to the next, and how it goes on from that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpkernels.federated.release import affordable
from dpkernels.privacy.private_sampler import PrivateSampler

if TYPE_CHECKING:
    from dpkernels.federated.loop import Federation


def state_of(run: Federation) -> dict[str, Any]:
    """Return server, clients, accountant, keys, sampler and counters.

    Client state is private. Keys from the operating system are not in it.
    """
    return {
        "algorithm": repr(run.algorithm),
        "release": repr(run.release),
        "delta": run.delta,
        "multipliers": dict(run.multipliers),
        "server": {name: value.clone() for name, value in run.server.items()},
        "clients": {name: value.clone() for name, value in run._clients.items()},
        "accountant": run.accountant.state_dict(),
        "keys": run._keys.state_dict(),
        "central_key": run._central_key.state_dict(),
        "sampler": None if run._sampler is None else run._sampler.state_dict(),
        "again": run._again,
        "position": run._position,
        "rounds_begun": run.rounds_begun,
        "faults": dict(run.faults),
        "bytes": [run.bytes_up, run.bytes_down],
        "seconds": run.seconds,
    }


def restore(run: Federation, state: dict[str, Any]) -> None:
    """Put back what ``state_of`` returned: see ``Federation.load_state_dict``."""
    for name, own in (
        ("algorithm", repr(run.algorithm)),
        ("release", repr(run.release)),
        ("delta", run.delta),
        ("multipliers", run.multipliers),
    ):
        if state[name] != own:
            raise ValueError(
                f"Federation.load_state_dict: {name} must be {own}, got the state of "
                f"{state[name]}; make the federation as it was"
            )
    run.accountant.load_state_dict(state["accountant"])
    begun = _count_what_was_seen(run, state["rounds_begun"])
    run.server = {name: value.clone() for name, value in state["server"].items()}
    run._clients = {name: value.clone() for name, value in state["clients"].items()}
    run._keys.load_state_dict(state["keys"])
    run._central_key.load_state_dict(state["central_key"])
    if run._sampler is not None:
        run._sampler.load_state_dict(state["sampler"])
        run._cohorts = endless(run._sampler)
    run._again = state["again"]
    run._position, run.rounds_begun = state["position"], begun
    run._schedule = [stage for stage in run.stages for _ in range(stage.rounds)]
    if run.epsilon_target is not None and run.void is None:
        limit = run.epsilon_target, run.delta
        plan = [(run.statement(s), run.release.steps(s)) for s in run._schedule]
        del run._schedule[affordable(run.accountant, plan, run._position, *limit) :]
    run.faults = Counter(state["faults"])
    run.bytes_up, run.bytes_down = state["bytes"]
    run.seconds = state["seconds"]
    run._prepared = run.problem
    if len(run.stages) > 1 and run._position >= run.stages[0].rounds:
        run._prepared = run.algorithm.prepared(run.problem, run.server)


def _count_what_was_seen(run: Federation, begun: int) -> int:
    """Account for the rounds that the journal has after ``begun``; return the last one's index.

    Rounds that ``run`` itself began are in its accountant already.
    """
    if run._journal is None:
        return begun
    stages = {stage.name: stage for stage in run.stages}
    begun = max(begun, run.rounds_begun)
    for index, name in run._journal.beyond(begun):
        stage = stages[name]
        run.accountant.compose(run.statement(stage), run.release.steps(stage))
        begun = index
    return begun


def endless(sampler: PrivateSampler) -> Iterator[list[int]]:
    """Yield one cohort after the other, epoch after epoch."""
    while True:
        yield from sampler
