"""What a server gets from the clients of one round: with a clip, with noise, folded.

All are updates ``[K, D]``: the upload less what was broadcast, over the server's rate, which is
public. The attack is on the server's side, so that ``each_upload`` is what it sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.client_noise import ClientNoise
from dpkernels.federated.clipping import clip_rows
from dpkernels.federated.contract import Query, Stage
from dpkernels.federated.folding import thresholded
from dpkernels.federated.problem import Layer

CLIP = 1.0
RATE = 0.1  # eta: of a client's step, and of the server's
# (lambda, theta) of FedCEO on CIFAR-10 by sigma: the threshold of the first round that is folded.
_FEDCEO = {1.0: (85.0, 1.03), 1.5: (10.0, 1.07), 2.0: (0.6, 1.04)}
SIGMAS = tuple(_FEDCEO)


@dataclass(frozen=True)
class Round:
    """One round before anybody protects anything.

    theta: ``[D]``, what was broadcast. layers: its parameters, in order.
    updates: ``[K, D]``, each client's w - theta.
    """

    theta: Tensor
    layers: tuple[Layer, ...]
    updates: Tensor


@dataclass(frozen=True)
class Method:
    """One way to send ``updates``.

    share: each element's noise is N(0, share (sigma C)^2); 0 for none. Algorithms 1 and 2 of
        FedCEO's paper send 1/K: a single upload then has noise multiplier sigma / sqrt(K).
    folded: the attack is on the slice that FedCEO's server makes of the uploads.
    """

    name: str
    clipped: bool = True
    share: Callable[[int], float] = lambda clients: 0.0
    folded: bool = False

    @property
    def noisy(self) -> bool:
        """Whether sigma matters."""
        return self.share(1) > 0


METHODS = (
    Method("FedAvg", clipped=False),
    Method("clip, no noise"),
    Method("FedCEO slice, no noise", folded=True),
    Method("UDP-FedAvg", share=lambda clients: 1 / clients),
    Method("UDP-FedAvg, full noise", share=lambda clients: 1.0),
    Method("FedCEO upload", share=lambda clients: 1 / clients),
    Method("FedCEO slice", share=lambda clients: 1 / clients, folded=True),
)


def noise_std(method: Method, sigma: float, clients: int) -> float:
    """Return the deviation of each element's noise in an update."""
    return sigma * CLIP * math.sqrt(method.share(clients))


def seen(method: Method, made: Round, sigma: float, seed: int) -> Tensor:
    """Return the updates ``[K, D]`` that a server has of ``made`` under ``method``.

    sigma: the noise multiplier; without noise it chooses the threshold alone.
    seed: of the noise, which a repeated run shall have again. It protects nobody.
    """
    updates = clip_rows(made.updates, CLIP) if method.clipped else made.updates.clone()
    clients = len(updates)
    if method.noisy:
        stage = Stage("upload", Query(tuple(made.theta.shape), CLIP), rounds=1)
        # A key for each client of each seed, and for nothing else.
        keys = torch.arange(clients) + seed * clients
        std = noise_std(method, sigma, clients)
        ClientNoise(stage, std, keys, torch.zeros_like(keys))(updates)
    if not method.folded:
        return updates
    sent = made.theta + RATE * updates
    return (thresholded(made.layers, sent, threshold(sigma)) - made.theta) / RATE


def threshold(sigma: float) -> float:
    """Return FedCEO's theta^(t/I) / (2 lambda) at t = I."""
    penalty, ratio = _FEDCEO[sigma]
    return ratio / (2 * penalty)
