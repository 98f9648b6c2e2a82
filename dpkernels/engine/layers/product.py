"""Matrix products inside of a module that is several layers in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Norms, OrthogonalParts
from dpkernels.engine.layers.linear import LinearLayer, check_sizes, computing_dtype
from dpkernels.engine.sides import IDENTITY, Sides
from dpkernels.ops.ghost.plan import Plan

# Inputs and errors of one product.
Pair = tuple[Tensor, Tensor]


class CapturedProducts(torch.autograd.Function):
    """Products ``x_k W_k^T + b_k`` whose one backward pass hands over all inputs and errors."""

    @staticmethod
    def forward(
        ctx: Any, deliver: Callable[[list[Pair]], None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the products; tensors: all x, then all W, then all b, each of which may be None.

        Weights are inputs so that the products need a gradient.
        """
        count = len(tensors) // 3
        ctx.deliver, ctx.dtypes = deliver, [x.dtype for x in tensors[:count]]
        dtype = computing_dtype(tensors[0])
        cast = [None if x is None else x.to(dtype) for x in tensors]
        inputs, weights, biases = cast[:count], cast[count : 2 * count], cast[2 * count :]
        ctx.save_for_backward(*inputs, *weights)
        return tuple(map(functional.linear, inputs, weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, ...]:
        """Deliver, and return the gradients of the inputs only."""
        count, saved = len(errors), ctx.saved_tensors
        inputs, weights = saved[:count], saved[count:]
        ctx.deliver(list(zip(inputs, errors, strict=True)))
        needed = ctx.needs_input_grad[1 : 1 + count]
        gradients = [
            (errors[k] @ weights[k]).to(ctx.dtypes[k]) if needed[k] else None for k in range(count)
        ]
        return None, *gradients, *[None] * (2 * count)


captured_products: Callable[..., tuple[Tensor, ...]] = CapturedProducts.apply


class Product(LinearLayer):
    """``x W^T + b`` with W and b from a module that has more of them: a sublayer of its rule.

    weight, bias: of the product, trained or frozen; None where it has none. One without a weight is
        a bias alone, whose errors are delivered in place of the activations, too.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None = None,
    ) -> None:
        both = {"weight": weight, "bias": bias}
        trained = {key: p for key, p in both.items() if p is not None and p.requires_grad}
        super().__init__(name, module, trained)
        if weight is not None:
            self._shape = tuple(weight.shape)
        else:
            self._shape = (0 if bias is None else bias.numel(), 0)

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raise: the module is called, not its parts."""
        raise NotImplementedError

    def check_sides(self, sides: Sides) -> None:
        """Raise ValueError for factors of the wrong size."""
        outputs, inputs = self._shape
        check_sizes(self, sides, outputs, inputs)


class RowBlocks(OrthogonalParts):
    """Norms of parameters whose rows were used apart: part k is about ``sizes[k]`` rows."""

    def add_to(self, sums: Sequence[Tensor], factors: Tensor, accumulate: bool) -> None:
        """Add the weighted sum of each part to its rows of the buffers."""
        rows = zip(*(total.split(self.sizes) for total in sums), strict=True)
        for part, buffers in zip(self.parts, rows, strict=True):
            part.add_to(buffers, factors, accumulate)


class PackedProduct(Product):
    """A weight whose blocks of rows belong to several products, of inputs that may differ.

    Captured are inputs ``[B, T, I]`` and errors ``[B, T, n]`` of each product in turn, n its rows.
    """

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms of all rows; factors act on the whole, so rows are then put together."""
        if len(captured) == 2 or sides != IDENTITY:
            return super().norms(_as_one(captured), sides)
        pairs = _pairs(captured)
        parts = tuple(super(PackedProduct, self).norms(pair, sides) for pair in pairs)
        return RowBlocks(parts, tuple(errors.shape[-1] for _, errors in pairs))

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of ``ops.ghost``, of several products the sum."""
        if len(captured) == 2 or sides != IDENTITY:
            return super().plan(_as_one(captured), sides)
        plans = [super(PackedProduct, self).plan(pair, sides) for pair in _pairs(captured)]
        return replace(
            plans[0],
            formula=", ".join(dict.fromkeys(plan.formula for plan in plans)),
            flops=sum(plan.flops for plan in plans),
            bytes=sum(plan.bytes for plan in plans),
            kept_bytes=sum(plan.kept_bytes for plan in plans),
            alternatives={},
        )

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the positions of all uses and products side by side."""
        return super().merged([_as_one(use) for use in uses])


def _pairs(captured: Captured) -> list[Pair]:
    return list(zip(captured[::2], captured[1::2], strict=True))


def _as_one(captured: Captured) -> Captured:
    """Return several products as one, with errors of zero in the rows that are not theirs."""
    if len(captured) == 2:
        return captured
    inputs, errors = captured[::2], captured[1::2]
    total, before, padded = sum(d.shape[-1] for d in errors), 0, []
    for d in errors:
        padded.append(functional.pad(d, (before, total - before - d.shape[-1])))
        before += d.shape[-1]
    return torch.cat(inputs, 1), torch.cat(padded, 1)
