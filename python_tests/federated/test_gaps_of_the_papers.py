"""Steps of the papers that void their statement: each moves what is seen further than claimed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpkernels.federated import FedNew, Scaffold, SoftmaxProblem, Terms, Visit
from dpkernels.ops.glm import Records
from python_tests.federated.cases import upload_of
from python_tests.federated.neighbours import CLASSES, FEATURES, largest, moves


def test_the_rescaling_by_xi_is_found_to_move_an_upload_ten_times_too_far():
    # At C1 = C2 the worst is sqrt(2 |D|) times the bound: 14.1 at |D| = 100.
    count = 100
    terms = Terms(1, float(count), (CLASSES, FEATURES), 1, "record", "each_upload", "add-remove")

    def ratio(algorithm):
        bound = algorithm.sensitivity(terms)
        return lambda candidates: moves(algorithm, terms, candidates).amax(1) / bound

    search = {"n": count - 1, "names": ("theta", "y"), "climbs": 150, "k": 32}
    xi, project = (FedNew(hessian="none", rescale=rescale) for rescale in ("xi", "project"))
    worst, where = largest(ratio(xi), **search)
    assert 10 <= worst <= math.sqrt(2 * count) * (1 + 1e-9)
    assert xi.void(terms) is not None
    # The same neighbours, and all others, move a projected sum by the bound at most.
    assert ratio(project)(where).item() <= 1 + 1e-9
    assert largest(ratio(project), **search)[0] <= 1 + 1e-9
    assert project.void(terms) is None


class Gap:
    """Two rounds of DP-FedNew under secure aggregation, with duals made of noisy uploads.

    One feature x, two classes, so that all that moves is along u = (1, -1) / sqrt 2. Client 0 has
    records that are certain and wrong: a gradient, but no curvature. One more record with curvature
    moves its y down by as much as is declared. The others have curvature, so that their duals
    hardly move them.
    """

    clients, count = 100, 100
    along = torch.tensor([[1.0], [-1.0]], dtype=torch.float64) / math.sqrt(2)
    theta = torch.tensor([[0.2], [-0.2]], dtype=torch.float64)

    def __init__(self) -> None:
        self.algorithm = FedNew(hessian="exact", alpha=0.001, rho=0.02, dual="uploaded")
        self.terms = Terms(
            self.clients, float(self.count), (2, 1), 2, "record", "aggregate", "add-remove"
        )

    def problem(self, more: bool) -> SoftmaxProblem:
        certain = int(0.97 * self.count)
        x = torch.full((certain + 1,), 50.0)
        x[-1] = math.sqrt(2)
        labels = torch.ones(certain + 1, dtype=torch.int64)
        own = (x, labels) if more else (x[:-1], labels[:-1])
        others = (self.clients - 1) * self.count
        everybody = torch.cat((own[0], torch.full((others,), math.sqrt(2))))
        classes = torch.cat((own[1], torch.arange(others) % 2))
        ends = [0, *(len(own[0]) + self.count * i for i in range(self.clients))]
        table = Records.ragged(everybody.double()[:, None], classes, ends)
        return SoftmaxProblem(table, torch.zeros(1, 1), torch.zeros(1, dtype=int), classes=2)

    def rounds(self, more: bool, noise: Tensor, y: float) -> tuple[Tensor, Tensor]:
        """Return both rounds' y of every client, along u, for the noise of the first round.

        y: what is broadcast in the second round, the same in both worlds.
        """
        held, nothing = self.problem(more), torch.zeros_like(self.theta)
        sent = {"theta": self.theta, "y": nothing}
        first, state = upload_of(self.algorithm, self.terms, held, sent)
        state["own"] = first[:, 0] + noise[:, None, None] * self.along
        again = {"theta": self.theta, "y": y * self.along}
        second, _ = upload_of(self.algorithm, self.terms, held, again, state=state)
        return tuple((part[:, 0] * self.along).sum((1, 2)) for part in (first, second))


def test_duals_made_of_uploads_move_two_sums_further_than_is_claimed():
    gap, none = Gap(), torch.zeros(Gap.clients, dtype=torch.float64)
    # s = g - rho own + 2 rho y = -0.97 in the second round.
    own = gap.rounds(False, none, 0.0)[0][0].item()
    y = (-0.97 - 0.97 + gap.algorithm.rho * own) / (2 * gap.algorithm.rho)
    without, with_it = gap.rounds(False, none, y), gap.rounds(True, none, y)
    moved = torch.stack([(b - a).sum() for a, b in zip(without, with_it, strict=True)])
    bound = gap.algorithm.sensitivity(gap.terms)
    assert moved[0].abs() <= bound
    assert moved[1].abs() > 1.4 * bound, "one round alone moves further than is claimed"
    # The noise of the first round is in the second sum too, through the duals: linearly here.
    step = 1e-4
    grown = gap.rounds(False, torch.full_like(none, step), y)[1] - without[1]
    weights = grown / step
    share = 1 / gap.clients  # of a variance of 1, which is the noise of each sum
    noise = torch.tensor(
        [
            [1.0, weights.sum() * share],
            [weights.sum() * share, 1 + weights.square().sum() * share],
        ],
        dtype=torch.float64,
    )
    # Claimed: two Gaussian releases with this bound, mu^2 = 2 for noise of one bound.
    squared = (moved @ torch.linalg.solve(noise, moved) / bound**2).item()
    assert squared > 1.3 * 2
    assert gap.algorithm.void(gap.terms) is not None


@pytest.mark.parametrize("dual", ["none", "uploaded"])
def test_the_sound_choices_have_a_guarantee(dual):
    gap = Gap()
    algorithm = FedNew(dual=dual)
    uploads_seen = Terms(**{**vars(gap.terms), "view": "each_upload"})
    assert algorithm.void(uploads_seen) is None
    assert (algorithm.void(gap.terms) is None) == (dual == "none")


def test_local_steps_on_a_share_of_the_noise_move_a_sum_further_than_is_claimed():
    # A record moves the client across a decision boundary, and the second step moves all others.
    count, clients, multiplier, rate = 100, 2500, 5.0, 0.5
    algorithm = Scaffold(local_steps=2, local_lr=rate, control="none")
    terms = Terms(clients, float(count), (2, 1), 1, "record", "aggregate", "add-remove")
    bound = algorithm.stages(terms)[0].query.sensitivity
    share = multiplier * bound / math.sqrt(clients)
    x = torch.full((count + 1, 1), 1e4, dtype=torch.float64)
    labels = torch.arange(count + 1) % 2
    generator = torch.Generator().manual_seed(0)
    sums = {True: [], False: []}
    for _ in range(50):
        noise = share * torch.randn(1, 2, 1, generator=generator, dtype=torch.float64)
        for more in (True, False):
            n = count + int(more)
            held = SoftmaxProblem(
                Records.ragged(x[:n], labels[:n], [0, n]), x[:1], labels[:1], classes=2
            )
            cohort, sent = held.cohort(torch.arange(1)), {"theta": held.initial()}
            stage = algorithm.stages(terms)[0]
            noisy = lambda values, noise=noise: values + noise  # noqa: E731
            upload, _ = algorithm.client(Visit(stage, terms, held, cohort, {}, sent, noisy))
            sums[more].append(upload)
    moved = (torch.cat(sums[True]).mean(0) - torch.cat(sums[False]).mean(0)).norm()
    # Two releases that each move by the bound, in the same direction.
    assert moved > 10 * rate * 2 * bound
    assert algorithm.void(terms) is not None
    assert Scaffold(local_steps=1, control="none").void(terms) is None
