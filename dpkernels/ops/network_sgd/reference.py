"""One epoch of SGD on sequential networks in plain PyTorch, client by client."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from dpkernels.ops.network_sgd.layers import NUMBERS, Layer


def network_epoch_(
    parameters: Tensor,
    velocity: Tensor | None,
    theta: Tensor,
    records: Tensor,
    rows: Tensor,
    labels: Tensor,
    counts: list[int],
    masks: list[Tensor],
    layers: list[int],
    batch_size: int,
    lr: float,
    momentum: float,
    first: bool,
    last: bool,
) -> None:
    """Take the steps of ``dpkernels.ops.network_sgd.network_epoch_``."""
    chain = [Layer.of(layers[i : i + NUMBERS]) for i in range(0, len(layers), NUMBERS)]
    starts = theta.expand(len(parameters), -1)
    if velocity is not None and first:
        velocity.zero_()
    for i, count in enumerate(counts):
        last_step = None if velocity is None else velocity[i]
        w = (starts[i] if first else parameters[i]).clone()
        for begin in range(0, count, batch_size):
            part = slice(begin, min(begin + batch_size, count))
            levels = iter([mask[i, part] for mask in masks])
            kept = [_kept(layer, next(levels), w) if layer.levels else None for layer in chain]
            gradient = _gradient(chain, w, records[rows[i, part]], labels[i, part], kept)
            if last_step is None:
                w.sub_(gradient, alpha=lr)
            else:
                w.add_(last_step.mul_(momentum).sub_(gradient, alpha=lr))
        parameters[i] = w - starts[i] if last else w


def _kept(layer: Layer, levels: Tensor, like: Tensor) -> Tensor:
    """Return the scaled mask, ``[b, C, H, W]``; levels: ``[b, H * W * C]``."""
    channels, height, width = layer.made
    mask = (levels.to(torch.int32) < layer.kept).to(like.dtype) * layer.scale
    return mask.view(-1, height, width, channels).permute(0, 3, 1, 2)


def _gradient(
    chain: list[Layer], w: Tensor, x: Tensor, labels: Tensor, kept: list[Tensor | None]
) -> Tensor:
    """Return the gradient of the batch's mean loss at ``w``, ``[D]``.

    Autograd on a leaf of its own: the operator itself may be called where gradients are off.
    """
    with torch.inference_mode(False), torch.enable_grad():
        own = w.detach().clone().requires_grad_()
        for layer, mask in zip(chain, kept, strict=True):
            x = _made(layer, own, x.reshape(-1, *layer.image))
            x = x if mask is None else x * mask
        loss = torch.nn.functional.cross_entropy(x.flatten(1), labels)
        (gradient,) = torch.autograd.grad(loss, own)
    return gradient


def _made(layer: Layer, w: Tensor, x: Tensor) -> Tensor:
    """Return what the layer makes before dropout; x: ``[b, C, H, W]``."""
    if layer.kind != "pass":
        shape = (layer.outputs, layer.image[0], *layer.kernel.size)
        size = torch.Size(shape).numel()
        weight = w[layer.weight : layer.weight + size].view(shape)
        bias = None if layer.bias is None else w[layer.bias : layer.bias + layer.outputs]
        x = conv2d(x, weight, bias, layer.kernel.stride, layer.kernel.padding)
    if layer.activation == "relu":
        x = x.relu()
    elif layer.activation == "tanh":
        x = x.tanh()
    return max_pool2d(x, layer.pool.size, layer.pool.stride, layer.pool.padding)
