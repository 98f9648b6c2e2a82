"""LayerNorm, RMSNorm, GroupNorm, InstanceNorm: normalise, then scale and shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms, Rows, WeightAndBias, bias_plan
from dpkernels.engine.sides import Sides
from dpkernels.ops import ghost
from dpkernels.ops.factor import Diagonal
from dpkernels.ops.ghost import scale_shift
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan

# The overloads themselves: to choose one takes 20 us a call.
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default


class CapturedScaleShift(torch.autograd.Function):
    """``xhat * weight + bias`` whose backward pass delivers xhat and errors to a site.

    weight, bias: of a shape that broadcasts to that of xhat.
    """

    @staticmethod
    def forward(ctx: Any, xhat: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        """Return the scaled and shifted values."""
        weight = weight.to(xhat.dtype)
        ctx.site = site
        ctx.save_for_backward(xhat, weight)
        if bias is None:
            return xhat * weight
        return torch.addcmul(bias.to(xhat.dtype), xhat, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Deliver, and return the gradient of xhat only."""
        xhat, weight = ctx.saved_tensors
        ctx.site.deliver(xhat, errors)
        return (errors * weight if ctx.needs_input_grad[0] else None), None, None, None


captured_scale_shift: Callable[..., Tensor] = CapturedScaleShift.apply


class CapturedNorm(torch.autograd.Function):
    """LayerNorm or GroupNorm in one piece, as torch computes them, with xhat formed for the site.

    Beside ``CapturedScaleShift`` this keeps one tensor less and reads two less.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site) -> Tensor:
        """Return the normalised, scaled and shifted values."""
        module = site.layer.module
        if isinstance(module, nn.LayerNorm):
            shape = list(module.normalized_shape)
            out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, module.eps)
        else:
            x = x.contiguous()
            sizes = _group_sizes(x, module)
            out, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, module.eps)
        ctx.site = site
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Deliver, and return the gradient of the input only."""
        x, weight, bias, mean, rstd = ctx.saved_tensors
        module, only_x = ctx.site.layer.module, [True, False, False]
        inputs = None
        if isinstance(module, nn.LayerNorm):
            ctx.site.deliver((x - mean).mul_(rstd), errors)
            if ctx.needs_input_grad[0]:
                inputs, _, _ = _layer_norm_backward(
                    errors, x, module.normalized_shape, mean, rstd, weight, bias, only_x
                )
            return inputs, None, None, None
        batch, _, _, groups = sizes = _group_sizes(x, module)
        by_group = x.view(batch, groups, -1) - mean.unsqueeze(-1)
        ctx.site.deliver(by_group.mul_(rstd.unsqueeze(-1)).view_as(x), errors)
        if ctx.needs_input_grad[0]:
            errors = errors.contiguous()
            inputs, _, _ = _group_norm_backward(errors, x, mean, rstd, weight, *sizes, only_x)
        return inputs, None, None, None


captured_norm: Callable[..., Tensor] = CapturedNorm.apply


def _group_sizes(x: Tensor, module: Any) -> tuple[int, int, int, int]:
    """Return samples, channels, positions and groups."""
    batch, channels = x.shape[:2]
    return batch, channels, math.prod(x.shape[2:]), module.num_groups


class ScaleShiftLayer(Layer):
    """The affine end of a normalisation; per-sample gradients are vectors and are stored."""

    rule = "scale and shift"

    @property
    def channel_axis(self) -> int:
        """Where the weight's axis is: last for LayerNorm and RMSNorm, second for the others."""
        return -1 if isinstance(self.module, nn.LayerNorm | nn.RMSNorm) else 1

    def forward(self, site: Site, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output."""
        (x,) = (*args, *kwargs.values())
        module = self.module
        if isinstance(module, nn.LayerNorm | nn.GroupNorm) and _computes_in(x, module.weight.dtype):
            return captured_norm(x, module.weight, module.bias, site)
        xhat = self._normalised(x)
        shape = module.weight.shape
        if self.channel_axis == 1:
            shape = torch.Size([*shape, *[1] * (x.dim() - 2)])
        bias = getattr(module, "bias", None)
        return captured_scale_shift(
            xhat,
            module.weight.view(shape),
            None if bias is None else bias.view(shape),
            site,
        )

    def _normalised(self, x: Tensor) -> Tensor:
        module = self.module
        if isinstance(module, nn.LayerNorm):
            return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            return functional.rms_norm(x, module.normalized_shape, eps=module.eps)
        if isinstance(module, nn.GroupNorm):
            return functional.group_norm(x, module.num_groups, eps=module.eps)
        rank = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}[type(module)]
        if x.dim() != rank:
            raise RuntimeError(
                f"{self.describe()}: its input must have {rank} axes, samples first, got "
                f"{list(x.shape)}"
            )
        return functional.instance_norm(x, eps=module.eps)

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Return norms from xhat and errors of one shape."""
        xhat, errors = captured
        if not self.trains("weight"):
            return Rows.of([self._shifts(errors)])
        shape, bias = self.parameters["weight"].shape, self.trains("bias")
        norms = scale_shift.norms_unchecked(
            xhat, errors, shape, self.channel_axis, bias, sides.left, sides.right
        )
        return WeightAndBias(norms)

    def gradients(self, captured: Captured) -> tuple[Tensor, ...]:
        """Return ``[B, N]`` of the weight and of the bias."""
        xhat, errors = captured
        if not self.trains("weight"):
            return (self._shifts(errors),)
        shape, bias = self.parameters["weight"].shape, self.trains("bias")
        norms = scale_shift.norms_unchecked(
            xhat, errors, shape, self.channel_axis, bias, None, None
        )
        return norms.saved

    def _shifts(self, errors: Tensor) -> Tensor:
        dtype, batch = sum_dtype(errors.dtype), errors.shape[0]
        if self.channel_axis == 1:
            return errors.reshape(batch, errors.shape[1], -1).sum(2, dtype=dtype)
        return errors.reshape(batch, -1, self.module.bias.numel()).sum(1, dtype=dtype)

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Return the plan of ``ops.ghost``."""
        xhat, errors = captured
        if not self.trains("weight"):
            return bias_plan(errors, self.module.bias)
        return ghost.scale_shift_plan(
            tuple(xhat.shape),
            channel_axis=self.channel_axis,
            normalised_dims=self.module.weight.dim(),
            bias=self.trains("bias"),
            left=sides.left,
            right=sides.right,
            element_bytes=xhat.element_size(),
        )

    def merged(self, uses: Sequence[Captured]) -> Captured:
        """Return the uses' positions side by side."""
        if self.channel_axis == 1:
            xhat, errors = (
                torch.cat([x.unsqueeze(-1).flatten(2) for x in tensors], 2)
                for tensors in zip(*uses, strict=True)
            )
            return xhat, errors
        last = -1 - self.module.weight.dim()
        xhat, errors = (
            torch.cat([x.unsqueeze(1).flatten(1, last) for x in tensors], 1)
            for tensors in zip(*uses, strict=True)
        )
        return xhat, errors

    def check_sides(self, sides: Sides) -> None:
        """Raise ValueError unless both factors are diagonal and of the weight's size."""
        width = self.module.weight.numel()
        for name, factor in (("left", sides.left), ("right", sides.right)):
            if factor is None:
                continue
            if not isinstance(factor, Diagonal) or factor.size != width:
                raise ValueError(
                    f"{self.describe()}: {name} must be a Diagonal of size {width}, got "
                    f"{type(factor).__name__} of size {factor.size}"
                )


def _computes_in(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether nothing is cast: float32 or float64, which autocast leaves alone, not empty.

    In half precision the means may be of another dtype, and what they are taken from may overflow.
    """
    wide = x.dtype == dtype and dtype in (torch.float32, torch.float64)
    return wide and x.numel() > 0 and not torch.is_autocast_enabled(x.device.type)
