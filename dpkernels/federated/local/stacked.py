"""The parameters of many clients in one tensor per layer, and passes of all clients at once.

For client i, records b and layer l, with inputs a_l and what the loss changes by with outputs, d_l:

    forward   z_l = a_l W_l^T + bias           one ``bmm`` for all clients
    backward  d_{l-1} = d_l W_l, elementwise   one ``bmm``
    gradient  d_l^T a_l                        one ``baddbmm``, into the parameters or their steps

The last outputs are ``[k, classes, b]``: softmax down columns is twice as fast as along rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpkernels.federated.local.chain import Chain, Elementwise


class StackedNet:
    """A chain of linear layers with parameters of its own for each of k clients.

    theta: ``[k, D]``; copied. momentum: a step is u <- momentum u - gradient, w <- w + u.
    The first ``a`` clients can be passed alone: all takes and returns are ``[a, ...]``. What is
    returned stays valid till the next pass: buffers are kept.
    """

    def __init__(self, chain: Chain, theta: Tensor, momentum: float = 0.0) -> None:
        self.chain, self._momentum = chain, momentum
        self._storage: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.weights, self.biases = [], []
        for block in chain:
            size = block.inputs * block.outputs
            weight = theta[:, block.weight : block.weight + size]
            self.weights.append(
                weight.reshape(len(theta), block.outputs, block.inputs).clone(
                    memory_format=torch.contiguous_format
                )
            )
            self.biases.append(
                None
                if block.bias is None
                else theta[:, block.bias : block.bias + block.outputs].contiguous().clone()
            )
        # Last steps, of what has taken one: a layer in the span of its records has none here.
        self._last: dict[str, Tensor] = {}
        # Of every layer: its inputs [a, b, in]; of every elementwise operation: its outputs.
        self.inputs: list[Tensor] = []
        self._outputs: list[list[Tensor]] = []
        self._masks: list[list[Tensor]] = []

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Return memory of this shape, whatever is in it; one storage for each name."""
        view = self._views.get((name, shape))
        if view is None:
            size, like = math.prod(shape), self.weights[0]
            if name not in self._storage or self._storage[name].numel() < size:
                self._storage[name] = like.new_empty(size)
                self._views = {key: v for key, v in self._views.items() if key[0] != name}
            view = self._storage[name][:size].view(shape)
            self._views[name, shape] = view
        return view

    def forward(self, records: Tensor, masks: list[Tensor]) -> Tensor:
        """Return logits, ``[a, classes, b]``.

        records: ``[a, b, features]``; overwritten if operations come before the first layer.
        masks: of every dropout layer in order, ``[a, b, width]``.
        """
        self._begin(masks)
        self.inputs = [self._applied(0, records)]
        return self._rest(0)

    def forward_from(self, first: Tensor, masks: list[Tensor]) -> Tensor:
        """Return logits, from what the first of several layers puts out, ``[a, b, out]``."""
        self._begin(masks)
        self.inputs = [first.new_empty(0), self._applied(1, first)]
        return self._rest(1)

    def _begin(self, masks: list[Tensor]) -> None:
        given = iter(masks)
        self._masks = [
            [next(given) for op in block.before if op.kind == "dropout"] for block in self.chain
        ]
        self._outputs = [[] for _ in self.chain]

    def _rest(self, begin: int) -> Tensor:
        last = len(self.chain) - 1
        for layer in range(begin, last):
            found = self._linear(layer, self.inputs[layer])
            self.inputs.append(self._applied(layer + 1, found))
        inputs, clients = self.inputs[last], len(self.inputs[last])
        weight, bias = self.weights[last][:clients], self.biases[last]
        out = self.buffer("logits", clients, weight.shape[1], inputs.shape[1])
        if bias is None:
            return torch.bmm(weight, inputs.mT, out=out)
        return torch.baddbmm(bias[:clients].unsqueeze(2), weight, inputs.mT, out=out)

    def _linear(self, layer: int, inputs: Tensor) -> Tensor:
        clients, width = inputs.shape[:2]
        weight, bias = self.weights[layer][:clients], self.biases[layer]
        out = self.buffer(f"outputs {layer}", clients, width, weight.shape[1])
        if bias is None:
            return torch.bmm(inputs, weight.mT, out=out)
        return torch.baddbmm(bias[:clients].unsqueeze(1), inputs, weight.mT, out=out)

    def _applied(self, layer: int, values: Tensor) -> Tensor:
        """Apply what comes before a layer, in place but after a tanh, which needs its outputs."""
        masks = iter(self._masks[layer])
        after_tanh = False
        for index, op in enumerate(self.chain[layer].before):
            if after_tanh:
                values = self.buffer(f"applied {layer} {index}", *values.shape).copy_(values)
            if op.kind == "relu":
                values.relu_()
            elif op.kind == "tanh":
                values.tanh_()
            else:
                values.mul_(next(masks))
            after_tanh = after_tanh or op.kind == "tanh"
            self._outputs[layer].append(values)
        return values

    def residuals(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return softmax(logits) - one-hot labels in place of ``logits``, ``[a, classes, b]``.

        labels: int64 ``[a, b]``.
        """
        torch.softmax(logits, 1, out=logits)
        minus = logits.new_full((1, 1, 1), -1.0).expand(len(labels), 1, labels.shape[1])
        return logits.scatter_add_(1, labels.unsqueeze(1), minus)

    def backward(self, residuals: Tensor) -> list[Tensor]:
        """Return d_l of every layer, ``[a, b, out]``; residuals: those of the last layer."""
        found = [residuals.mT]
        for layer in range(len(self.chain) - 1, 0, -1):
            clients, width = found[0].shape[:2]
            weight = self.weights[layer][:clients]
            back = self.buffer(f"residuals {layer}", clients, width, weight.shape[2])
            torch.bmm(found[0], weight, out=back)
            found.insert(0, self._back(layer, back))
        return found

    def _back(self, layer: int, residuals: Tensor) -> Tensor:
        masks = list(self._masks[layer])
        pairs = zip(self.chain[layer].before, self._outputs[layer], strict=True)
        for op, outputs in reversed(list(pairs)):
            _back_through(op, residuals, outputs, masks)
        return residuals

    def step(self, residuals: list[Tensor], begin: int = 0) -> None:
        """Take every layer's step: weights from layer ``begin`` on, and all biases."""
        for layer, (bias, d) in enumerate(zip(self.biases, residuals, strict=True)):
            clients = len(d)
            if layer >= begin:
                weight, inputs = self.weights[layer], self.inputs[layer]
                if self._momentum:
                    last = self._last_of(f"weight {layer}", weight)[:clients]
                    last.baddbmm_(d.mT, inputs, beta=self._momentum, alpha=-1.0)
                    weight[:clients].add_(last)
                else:
                    weight[:clients].baddbmm_(d.mT, inputs, alpha=-1.0)
            if bias is None:
                continue
            if self._momentum:
                last = self._last_of(f"bias {layer}", bias)[:clients]
                bias[:clients].add_(last.mul_(self._momentum).sub_(d.sum(1)))
            else:
                bias[:clients].sub_(d.sum(1))

    def _last_of(self, name: str, parameter: Tensor) -> Tensor:
        """Return the last step of a parameter, of all clients; zeros before the first."""
        if name not in self._last:
            self._last[name] = torch.zeros_like(parameter)
        return self._last[name]

    def parameters(self) -> Tensor:
        """Return the parameters of every client, ``[k, D]``."""
        first = self.weights[0]
        size = sum(w[0].numel() for w in self.weights)
        size += sum(b[0].numel() for b in self.biases if b is not None)
        theta = first.new_empty(len(first), size)
        for block, weight, bias in zip(self.chain, self.weights, self.biases, strict=True):
            end = block.weight + block.inputs * block.outputs
            theta[:, block.weight : end] = weight.flatten(1)
            if bias is not None:
                theta[:, block.bias : block.bias + block.outputs] = bias  # type: ignore[operator]
        return theta


def _back_through(op: Elementwise, residuals: Tensor, outputs: Tensor, masks: list[Tensor]) -> None:
    """Multiply residuals with the derivative of ``op``, in place."""
    if op.kind == "dropout":
        residuals.mul_(masks.pop())
    elif op.kind == "relu":
        torch.ops.aten.threshold_backward.grad_input(residuals, outputs, 0, grad_input=residuals)
    else:
        torch.ops.aten.tanh_backward.grad_input(residuals, outputs, grad_input=residuals)
