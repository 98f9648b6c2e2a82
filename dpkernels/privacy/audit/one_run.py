"""One training, many canaries (Steinke, Nasr and Jagielski 2023).

Each of m canaries is in the training data or not by a fair coin. Afterwards the auditor guesses the
coins of those canaries that it feels sure of. Privacy limits how many it can guess correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.privacy.audit.result import AuditResult, check_levels
from dpkernels.privacy.gaussian import bisect

# Binomial tails and masses are right to 1e-12, to 1e-10 for a million guesses (the logarithm of a
# factorial is 1e7 then); p-values are raised by more than that.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class OneRunResult(AuditResult):
    """What one training gave away.

    canaries: how many there were. guesses: how many coins were guessed. correct: how many of them
    rightly; without privacy all, with epsilon = 0 about half.
    """

    canaries: int
    guesses: int
    correct: int


def one_run_audit(
    train_and_score: Callable[[Tensor], Tensor],
    *,
    canaries: int,
    delta: float,
    confidence: float = 0.95,
    guesses: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> OneRunResult:
    """Return a lower bound on the epsilon of a training, from a single run of it.

    Unit: one canary, added or removed. Seen: whatever the scores are computed from.

    train_and_score: gets the coins, bool ``[m]``, trains with those canaries that are True, and
        returns a score for every canary, ``[m]``: the higher, the more it seems to have been in.
        Scores must not be computed from the coins. ``loss_decrease`` is one for classifiers.
    canaries: m. With no privacy at all the bound is about log(m / log(1 / (1 - confidence))), so m
        is what limits it: about 4 for 200 canaries.
    guesses: how many coins are guessed: half of them for the highest scores (in), half for the
        lowest (out). Chosen before the run: of several numbers the best bound is taken, each at a
        confidence that pays for the choice (Bonferroni). None is m, m/2, m/4 and m/8.
    generator: of the coins; seeded by the operating system if None.

    Raises ValueError for bad numbers, and for scores that are not m finite ones.
    """
    tried = _guesses(canaries, guesses)
    # Checks everything before the training, which is what takes long.
    epsilon_lower_bound(canaries, tried[0], 0, delta, confidence)
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    included = torch.rand(canaries, generator=generator) < 0.5
    scores = train_and_score(included.clone()).detach().to("cpu", torch.float64)
    if scores.shape != (canaries,) or not bool(scores.isfinite().all()):
        raise ValueError(
            f"train_and_score must return {canaries} finite scores, got shape "
            f"{list(scores.shape)}, {int((~scores.isfinite()).sum())} of them not finite"
        )
    # Of equal scores the first canaries count as higher: their coins are like any others.
    ranked = included[torch.argsort(scores, descending=True, stable=True)]
    each = 1 - (1 - confidence) / len(tried)
    found = []
    for count in tried:
        out = count // 2
        correct = int(ranked[: count - out].sum()) + int((~ranked[canaries - out :]).sum())
        bound = epsilon_lower_bound(canaries, count, correct, delta, each)
        found.append(OneRunResult(bound, delta, confidence, canaries, count, correct))
    return max(found, key=lambda result: result.epsilon_lower)


def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Return the epsilon that ``correct`` of ``guesses`` about ``canaries`` fair coins rule out.

    Whatever is (epsilon, delta)-private guesses v or more of r coins, of m, with probability at
    most (Section 5, Appendix D)

        P[X >= v] + 2 m delta max_i P[v - i <= X < v] / i,    X ~ Binomial(r, 1 / (1 + e^-epsilon)).

    Returns the epsilon at which that is 1 - confidence, rounded down; 0 if no epsilon is ruled out.
    The number of guesses must not have been chosen by the result.

    Raises ValueError for counts that are not in order, and for delta above 1 / (2 m): below that
    each term of the maximum grows with epsilon (its derivative is r P[X' = v-1] (1 - 2 m delta / i)
    plus something positive, X' ~ Binomial(r - 1)), so that all smaller epsilon are ruled out too.
    """
    check_levels(delta, confidence)
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise ValueError(
            "epsilon_lower_bound: wanted 0 <= correct <= guesses <= canaries and guesses >= 1, got "
            f"{correct}, {guesses} and {canaries}"
        )
    if 2 * canaries * delta > 1:
        raise ValueError(
            f"delta must be at most 1 / (2 canaries) = {0.5 / canaries:g}, got {delta}; above it "
            "this audit can show nothing"
        )

    def ruled_out(epsilon: float) -> bool:
        chance = _chance(canaries, guesses, correct, epsilon, delta)
        return chance * (1 + _ROUNDING) <= 1 - confidence

    if not ruled_out(0.0):
        return 0.0
    high = 1.0
    while ruled_out(high):
        high *= 2
    return bisect(ruled_out, 0.0, high)[0]


def loss_decrease(
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
    inputs: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return how much training lowered the loss of every canary, ``[m]``: a score.

    before, after: the model as it was and as it is, in evaluation mode; both give logits
        ``[m, classes]``. inputs ``[m, ...]`` and labels, int64 ``[m]``, are the canaries.

    The difference takes out how hard a canary is, which the loss alone would count as not trained.
    """
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(inputs).double(), labels, reduction="none")
            for model in (before, after)
        ]
    return losses[0] - losses[1]


def _chance(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of so many correct guesses under (epsilon, delta)-privacy."""
    import numpy as np
    from scipy.special import betainc, gammaln

    if correct == 0:
        return 1.0
    log_right = -math.log1p(math.exp(-epsilon))
    tail = float(betainc(correct, guesses - correct + 1, math.exp(log_right)))
    fewer = np.arange(correct - 1, -1, -1)
    mass = np.exp(
        gammaln(guesses + 1)
        - gammaln(fewer + 1)
        - gammaln(guesses - fewer + 1)
        + guesses * log_right
        - (guesses - fewer) * epsilon
    )
    worst = float((mass.cumsum() / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * worst)


def _guesses(canaries: int, guesses: int | Sequence[int] | None) -> list[int]:
    if canaries < 1:
        raise ValueError(f"one_run_audit: canaries must be >= 1, got {canaries}")
    if guesses is None:
        guesses = [canaries // part for part in (1, 2, 4, 8) if canaries >= part]
    tried = [guesses] if isinstance(guesses, int) else list(guesses)
    if not tried or not all(1 <= count <= canaries for count in tried):
        raise ValueError(
            f"one_run_audit: guesses must be from 1 to the number of canaries, {canaries}, "
            f"got {guesses}"
        )
    return tried
