"""The noise and its price: how far its tail reaches, and what the accountants say far out."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import torch
from torch import Tensor

import dpkernels
from benchmarks.adversary.attack import Attack, Claim, attack
from dpkernels.ops.noise import add_gaussian_noise_, reference
from dpkernels.privacy import Poisson, gaussian_step, make_accountant

WORDS = (0, 1, 2**30, 2**31, 2**32 - 1)


def support() -> float:
    """Return the largest |z| that the noise can be, over extreme words of the generator.

    Every word that Philox returns is replaced by a chosen one, in the plain form, which all
    backends are tested against.
    """
    largest = 0.0
    for chosen in itertools.product(WORDS, repeat=2):
        words = torch.tensor([*chosen, *chosen])

        def extreme(counters: Tensor, key: int, words: Tensor = words) -> Tensor:
            return words.expand(*counters.shape[:-1], 4).clone()

        z = torch.zeros(64, dtype=torch.float64)
        with dpkernels.use_backend("reference"), mock.patch.object(reference, "philox", extreme):
            add_gaussian_noise_(z, 1.0, 1, 0)
        largest = max(largest, float(z.abs().max()))
    return largest


@attack(6, "largest noise that can be drawn", Claim("sigma", least=9), refusable=False)
def largest_noise() -> float:
    """Return the support."""
    return support()


@attack(
    6,
    "probability of an output that the neighbour cannot have, sigma .5, q .001, 20,000 steps",
    Claim("(beside a delta of 1e-5)", most=1e-8),
    refusable=False,
)
def impossible_output() -> float:
    """Return it for a record that is drawn 20 times, and moves one number by C = 2 sigma."""
    beyond = support() - 1 / 0.5
    return 20_000 * 0.001 * 0.5 * math.erfc(beyond / math.sqrt(2))


@attack(
    11,
    "epsilon by pld, over that by rdp: sigma 1, q .01, 10,000 steps, delta 1e-12",
    Claim("of rdp's", most=1.01),
    refusable=False,
)
def far_out() -> float:
    """Return how much larger the tighter accountant's epsilon is."""
    found = {}
    for name in ("pld", "rdp"):
        accountant = make_accountant(name)
        accountant.compose(gaussian_step(1.0, Poisson(0.01)), 10_000)
        found[name] = accountant.epsilon(1e-12)
    return found["pld"] / found["rdp"]


ATTACKS: list[Attack] = [largest_noise, impossible_output, far_out]
