"""Local SGD of all clients of a round by ``torch.func``: one pass for all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from dpkernels.federated.local.batches import Batches
from dpkernels.federated.problem import Layer, LocalSGD

# Layers whose operations have rules for vmap, and that draw nothing: dropout under vmap takes its
# masks from one generator for all clients, and a client would not get the same alone.
MAPPED: tuple[type[nn.Module], ...] = (
    nn.Sequential,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Identity,
    nn.ReLU,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
)


def unmapped(model: nn.Module) -> str | None:
    """Return why ``vmapped_updates`` does not take the model; None if it does."""
    for module in model.modules():
        silent = isinstance(module, nn.Dropout) and not (module.training and module.p)
        if type(module) not in MAPPED and not silent:
            return f"{type(module).__name__} is not mapped over clients"
    return None


def vmapped_updates(
    model: nn.Module,
    layers: tuple[Layer, ...],
    x: Tensor,
    y: Tensor,
    rows: list[Tensor],
    theta: Tensor,
    local: LocalSGD,
    seeds: list[int],
) -> Tensor:
    """Return w - theta of every client after ``local``, ``[k, D]``; 0 without records.

    layers: the trained parameters. x: ``[N, ...]``. y: int64 ``[N]``. rows: of every client.
    theta: ``[D]`` or ``[k, D]``. Loss: cross-entropy.
    """
    batches = Batches(rows, local.batch_size, theta)
    start = theta.detach().expand(len(rows), theta.shape[-1])
    found = torch.zeros_like(start, memory_format=torch.contiguous_format)
    if not batches.by_size:
        return found
    at = torch.tensor(batches.by_size, device=theta.device)
    stacked = start[at]
    parameters = {
        layer.name: stacked[:, layer.begin : layer.begin + _size(layer)]
        .reshape(-1, *layer.shape)
        .clone()
        for layer in layers
    }
    velocities = {name: torch.zeros_like(p) for name, p in parameters.items() if local.momentum}
    kept = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    kept |= dict(model.named_buffers())

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        logits = functional_call(model, own | kept, (x,))
        return cross_entropy(logits, y, reduction="none") @ weights

    gradients = vmap(grad(loss))
    orders = batches.orders(seeds)
    places = torch.zeros(len(batches.rows), batches.most, dtype=torch.int64, device=theta.device)
    for _ in range(local.epochs):
        order = batches.epoch(orders, places)
        for batch in batches.steps:
            taken = [
                part[order[i, batch.positions]]
                for i, part in enumerate(batches.rows[: batch.clients])
            ]
            at_rows = torch.stack(taken)
            records = x[at_rows]
            if batch.absent is not None:
                records.flatten(0, 1).index_fill_(0, batch.absent, 0.0)
            own = {name: p[: batch.clients] for name, p in parameters.items()}
            steps = gradients(own, records, y[at_rows], batch.weights)
            for name, p in own.items():
                step = steps[name]
                if local.momentum:
                    step = velocities[name][: batch.clients].mul_(local.momentum).add_(step)
                p.sub_(step, alpha=local.lr)
    moved = torch.cat([parameters[layer.name].flatten(1) for layer in layers], 1)
    found[at] = moved - stacked
    return found


def _size(layer: Layer) -> int:
    return int(torch.Size(layer.shape).numel())
