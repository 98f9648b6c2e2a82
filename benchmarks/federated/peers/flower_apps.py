# mypy: disable-error-code="import-not-found, misc, untyped-decorator"
"""Flower's ClientApps: one full-batch SGD step by autograd, then clip and noise of the update.

Flower has no clipping of records: its modifiers clip the client's whole update, which protects a
user instead of a record. A module of its own, so that Ray imports it in its workers.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from torch import Tensor

from benchmarks.federated.peers.asked import Softmax
from benchmarks.federated.workload import CLIP, LR, NOISE_MULTIPLIER, Size, records_of

# Clients, records, features and classes; workers inherit it.
SIZE_VARIABLE = "DPKERNELS_PEER_SIZE"
_DELTA = 1e-5


@functools.cache
def _data(size: Size) -> tuple[Tensor, Tensor]:
    """Return all clients' records, made once in each worker."""
    return records_of(size)


@functools.cache
def _model(size: Size) -> Softmax:
    """Return the model, made once in each worker: clients overwrite its weights."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return Softmax(size.features, size.classes)


def _size() -> Size:
    return Size(*map(int, os.environ[SIZE_VARIABLE].split(",")))


def _local_noise(size: Size) -> LocalDpMod:
    """Return the modifier whose noise is each client's share of the sum's.

    Its deviation is sensitivity sqrt(2 ln(1.25 / delta)) / epsilon; epsilon is chosen to give it.
    """
    wanted = NOISE_MULTIPLIER * LR * CLIP / size.clients**0.5
    epsilon = LR * CLIP * math.sqrt(2 * math.log(1.25 / _DELTA)) / wanted
    return LocalDpMod(LR * CLIP, LR * CLIP, epsilon, _DELTA)


def _train(message: Message, context: Context) -> Message:
    """Take one step on the client's records, from the server's weights."""
    size = _size()
    model, client = _model(size), int(context.node_config["partition-id"])
    x, labels = (part[client] for part in _data(size))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.loss(x, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(labels)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def _app(mods: list[Any]) -> ClientApp:
    app = ClientApp(mods=mods)
    app.train()(_train)
    return app


central = _app([fixedclipping_mod])
local = _app([_local_noise(_size())]) if SIZE_VARIABLE in os.environ else None
