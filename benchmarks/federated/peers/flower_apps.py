# mypy: disable-error-code="import-not-found, misc, untyped-decorator"
"""Flower's ClientApps: local SGD by autograd, then clip and noise of the update.

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

from benchmarks.federated.peers.tasks import WORKLOADS, Classifier, Task, task_of
from benchmarks.federated.workload import NOISE_MULTIPLIER, Size

# Workload, clients, records, features and classes; workers inherit it.
TASK_VARIABLE = "DPKERNELS_PEER_TASK"
_DELTA = 1e-5


@functools.cache
def _task() -> Task:
    name, *numbers = os.environ[TASK_VARIABLE].split(",")
    workload = next(known for known in WORKLOADS if known == name)
    return task_of(workload, Size(*map(int, numbers)))


@functools.cache
def _data() -> tuple[Tensor, Tensor]:
    """Return all clients' records, made once in each worker."""
    return _task().records()


@functools.cache
def _model() -> Classifier:
    """Return the model, made once in each worker: clients overwrite its weights."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return Classifier(_task().network())


def _local_noise(task: Task) -> LocalDpMod:
    """Return the modifier whose noise is each client's share of the sum's.

    Its deviation is sensitivity sqrt(2 ln(1.25 / delta)) / epsilon; epsilon is chosen to give it.
    """
    wanted = NOISE_MULTIPLIER * task.clip / task.size.clients**0.5
    epsilon = task.clip * math.sqrt(2 * math.log(1.25 / _DELTA)) / wanted
    return LocalDpMod(task.clip, task.clip, epsilon, _DELTA)


def _train(message: Message, context: Context) -> Message:
    """Take the local steps on the client's records, from the server's weights."""
    task, model, client = _task(), _model(), int(context.node_config["partition-id"])
    x, labels = (part[client] for part in _data())
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    for rows in torch.randperm(len(labels)).split(task.batch or len(labels)):
        optimizer.zero_grad()
        model.loss(x[rows], labels[rows]).backward()
        optimizer.step()
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
local = _app([_local_noise(_task())]) if TASK_VARIABLE in os.environ else None
