"""Linear layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms, Rows, WeightAndBias, bias_plan
from dpkernels.engine.sides import Sides
from dpkernels.ops import ghost
from dpkernels.ops.ghost import linear as linear_ops
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.linear_plan import sizes_of
from dpkernels.ops.ghost.plan import Plan
from dpkernels.ops.kron import apply_factor


def computing_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a layer computes in: autocast's if that is on, else the input's."""
    kind = "cpu" if x.is_cpu else x.device.type  # the latter alone takes 5 us
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class CapturedLinear(torch.autograd.Function):
    """``x W^T + b`` whose backward pass delivers activations and errors to a site."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        """Return the layer's output; the weight is an input so that the output needs a gradient."""
        ctx.site, ctx.dtype = site, x.dtype
        dtype = computing_dtype(x)
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        out = functional.linear(x, weight, None if bias is None else bias.to(dtype))
        # Of more than two axes it is a view, which autograd lets nobody change in place. ``data``
        # is none, in the same memory: 1 us.
        return out.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Deliver, and return the input's gradient only."""
        x, weight = ctx.saved_tensors
        ctx.site.deliver(x, errors)
        inputs = (errors @ weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return inputs, None, None, None


captured_linear: Callable[..., Tensor] = CapturedLinear.apply


class AffineLayer(Layer):
    """``x W^T + b``, however the module keeps W."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The weight as ``[outputs, inputs]``."""

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output."""
        (x,) = (*args, *kwargs.values())
        if x.dim() < 2:
            raise RuntimeError(
                f"{self.describe()}: its input must have samples as its first axis, got a vector "
                f"of {list(x.shape)}"
            )
        return captured_linear(x, self.weight, self.module.bias, site)

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the uses' positions side by side: the gradient is the sum over all of them."""
        activations, errors = zip(*uses, strict=True)
        return as_positions(activations), as_positions(errors)


class LinearLayer(AffineLayer):
    """``nn.Linear``: ghost norms; a bias that is trained alone has its gradients stored."""

    rule = "linear"

    @property
    def weight(self) -> Tensor:
        """The module's own."""
        weight: Tensor = self.module.weight
        return weight

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms from activations ``[B, *, I]`` and errors ``[B, *, O]``."""
        activations, errors = captured
        if not self.trains("weight"):
            shifts = (
                errors.flatten(1, -2).sum(1, dtype=sum_dtype(errors.dtype))
                if errors.dim() > 2
                else errors
            )
            if sides.left is not None:
                shifts = apply_factor(shifts, sides.left)
            return Rows.of([shifts])
        bias, right = self.trains("bias"), sides.right
        sizes = sizes_of(activations.shape, errors.shape, right, bias)
        a, d = (x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2) for x in captured)
        return WeightAndBias(linear_ops.norms_unchecked(a, d, sizes, bias, sides.left, right))

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return ``[B, O, I]`` of the weight and ``[B, O]`` of the bias."""
        a, d = wide_positions(self, captured)
        weights = (torch.bmm(d.mT, a),) if self.trains("weight") else ()
        return (*weights, d.sum(1)) if self.trains("bias") else weights

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of ``ops.ghost``."""
        activations, errors = captured
        if not self.trains("weight"):
            return bias_plan(errors, self.parameters["bias"])
        return ghost.linear_plan(
            tuple(activations.shape),
            tuple(errors.shape),
            bias=self.trains("bias"),
            left=sides.left,
            right=sides.right,
            element_bytes=errors.element_size(),
        )

    def check_sides(self, sides: Sides) -> None:
        """Raise ValueError for factors of the wrong size."""
        outputs, inputs = self.weight.shape
        check_sizes(self, sides, outputs, inputs)


def as_positions(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors ``[B, *, n]`` as one ``[B, T, n]``."""
    return torch.cat([x.unsqueeze(1).flatten(1, -2) for x in tensors], 1)


def wide_positions(layer: AffineLayer, captured: Captured) -> tuple[Tensor, Tensor]:
    """Return activations ``[B, T, I]`` and errors ``[B, T, O]``, float32 or wider."""
    a, d = (x.to(sum_dtype(x.dtype)) for x in layer.merged([captured]))
    return a, d


def check_sizes(layer: Layer, sides: Sides, outputs: int, inputs: int) -> None:
    """Raise ValueError unless the factors fit a gradient ``[outputs, inputs]``."""
    wanted = [inputs, inputs + 1] if layer.trains("bias") else [inputs]
    for name, factor, sizes in (("left", sides.left, [outputs]), ("right", sides.right, wanted)):
        if factor is not None and factor.size not in sizes:
            raise ValueError(
                f"{layer.describe()}: {name} must be of size {' or '.join(map(str, sizes))}, got "
                f"{factor.size}"
            )
