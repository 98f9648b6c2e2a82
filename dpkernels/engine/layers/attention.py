"""Multi-head attention: products of queries, keys and values, attention, and a linear layer.

The module's own forward pass takes all its weights as they are, those of ``out_proj`` without
calling it. So attention is computed here: the products of the inputs are captured, ``out_proj`` is
called and captured by its own rule, and what is between them has no parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms, Unsupported
from dpkernels.engine.layers.product import PackedProduct, Pair, Product, captured_products
from dpkernels.engine.sides import Sides
from dpkernels.ops.ghost.layer import sum_dtype
from dpkernels.ops.ghost.plan import Plan

_APART = ("q_proj", "k_proj", "v_proj")


class CapturedCopies(torch.autograd.Function):
    """A parameter ``[1, 1, E]``, copied for each sample; its backward pass delivers the errors."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, batch: int, site: Site) -> Tensor:
        """Return ``[B, 1, E]``."""
        ctx.site = site
        return parameter.repeat(batch, 1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, errors: Tensor) -> tuple[None, None, None]:
        """Deliver; there is nothing to go on with."""
        ctx.site.deliver(errors, errors)
        return None, None, None


captured_copies: Callable[..., Tensor] = CapturedCopies.apply


class AttentionLayer(Layer):
    """``nn.MultiheadAttention``: its products are sublayers, ``out_proj`` is a layer of its own.

    Without a trained parameter of its own it is there to call ``out_proj``.
    """

    rule = "attention"

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(name, module, parameters)
        if type(self.module.out_proj).forward is not nn.Linear.forward:
            raise Unsupported(
                f"{self.describe()}: its out_proj is a {type(self.module.out_proj).__name__}, but "
                "the module only reads the weight of it and never calls it; put an nn.Linear there"
            )
        products = self._all_products()
        self._products = {part: p for part, p in products.items() if p.parameters}
        self.sublayers = tuple(self._products.values())

    def _all_products(self) -> dict[str, Product]:
        module, prefix = self.module, f"{self.name}." if self.name else ""
        products = {
            part: Product(prefix + part, module, getattr(module, f"{part}_weight"))
            for part in _APART
        }
        kind = Product if module.in_proj_weight is None else PackedProduct
        products["in_proj"] = kind(
            f"{prefix}in_proj", module, module.in_proj_weight, module.in_proj_bias
        )
        for part in ("bias_k", "bias_v"):
            products[part] = Product(prefix + part, module, None, getattr(module, part))
        return products

    def forward(
        self,
        site: Site,
        plain: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention's output and, if wanted, its weights."""
        module = self.module
        self._check_inputs(query, key, value)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                f"{self.describe()}: is_causal says that attn_mask is causal: pass that, too"
            )
        sites = {part: site.of(product) for part, product in self._products.items()}
        q, k, v = self._projected(sites, query, key, value)
        # The hint is taken where it spares the mask, as in the module's own forward pass.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, k)
        k, v, mask = self._extended(sites, k, v, mask)
        q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / module.head_dim)) @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = functional.dropout(weights, dropout) if dropout else weights
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = functional.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal
            )
        output = module.out_proj(attended.transpose(1, 2).flatten(2))
        return (output if module.batch_first else output.transpose(0, 1)), weights

    def _check_inputs(self, *inputs: Tensor) -> None:
        if any(x.is_nested or x.dim() != 3 for x in inputs):
            raise RuntimeError(
                f"{self.describe()}: query, key and value must be plain tensors of 3 axes, one of "
                "them the samples; pad sequences to one length and pass key_padding_mask"
            )
        axis = 0 if self.module.batch_first else 1
        query, key, value = inputs
        if query.shape[axis] != key.shape[axis] or key.shape[:2] != value.shape[:2]:
            raise RuntimeError(
                f"{self.describe()}: query, key and value must have the same samples in axis "
                f"{axis}, key and value the same positions, got {[list(x.shape) for x in inputs]}"
            )

    def _projected(self, sites: Mapping[str, Site], *inputs: Tensor) -> list[Tensor]:
        """Return q, k, v ``[B, T, E]``; inputs in a row that are one tensor share a product."""
        module, packed = self.module, self.module.in_proj_weight
        distinct, counts = [inputs[0]], [1]
        for x, previous in zip(inputs[1:], inputs[:-1], strict=True):
            if x is previous and packed is not None:
                counts[-1] += 1
            else:
                distinct.append(x)
                counts.append(1)
        rows = [count * module.embed_dim for count in counts]
        if packed is not None:
            weights = packed.split(rows)
        else:
            weights = [getattr(module, f"{part}_weight") for part in _APART]
        bias = module.in_proj_bias
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        if not module.batch_first:
            distinct = [x.transpose(0, 1) for x in distinct]
        deliver = partial(_deliver_packed if packed is not None else _deliver_apart, sites)
        products = captured_products(deliver, *distinct, *weights, *biases)
        return [x for y, count in zip(products, counts, strict=True) for x in y.chunk(count, -1)]

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
    ) -> Tensor | None:
        """Return what to add to the scores ``[B, heads, T, S]``, in a shape that broadcasts."""
        batch, heads, lengths = q.shape[0], self.module.num_heads, (q.shape[1], k.shape[1])
        mask = None
        if attn_mask is not None:
            if attn_mask.shape not in (lengths, (batch * heads, *lengths)):
                raise RuntimeError(
                    f"{self.describe()}: attn_mask must be {list(lengths)} or "
                    f"{[batch * heads, *lengths]}, got {list(attn_mask.shape)}"
                )
            mask = _additive(attn_mask, q.dtype).view(
                -1, heads if attn_mask.dim() == 3 else 1, *lengths
            )
        if key_padding_mask is not None:
            if key_padding_mask.shape != (batch, lengths[1]):
                raise RuntimeError(
                    f"{self.describe()}: key_padding_mask must be {[batch, lengths[1]]}, got "
                    f"{list(key_padding_mask.shape)}"
                )
            padding = _additive(key_padding_mask, q.dtype)[:, None, None]
            mask = padding if mask is None else mask + padding
        return mask

    def _extended(
        self, sites: Mapping[str, Site], k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and mask with the position that is a bias, and the one of zeros."""
        before = k.shape[1]
        if self.module.bias_k is not None:
            k = torch.cat([k, self._copies(sites, "bias_k", k)], 1)
            v = torch.cat([v, self._copies(sites, "bias_v", v)], 1)
        if self.module.add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = functional.pad(mask, (0, k.shape[1] - before))
        return k, v, mask

    def _copies(self, sites: Mapping[str, Site], part: str, like: Tensor) -> Tensor:
        """Return a bias ``[B, 1, E]``, in the dtype of what it is appended to."""
        parameter: Tensor = getattr(self.module, part).to(like.dtype)
        if part not in sites:
            return parameter.expand(like.shape[0], -1, -1)
        return captured_copies(parameter, like.shape[0], sites[part])

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Raise: the sublayers have norms."""
        raise NotImplementedError

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Raise: the sublayers have plans."""
        raise NotImplementedError


def _deliver_packed(sites: Mapping[str, Site], pairs: Sequence[Pair]) -> None:
    if "in_proj" in sites:
        sites["in_proj"].deliver(*(x for pair in pairs for x in pair))


def _deliver_apart(sites: Mapping[str, Site], pairs: Sequence[Pair]) -> None:
    """Deliver each product to its own weight, and what reached the biases to the one of all."""
    for part, pair in zip(_APART, pairs, strict=True):
        if part in sites:
            sites[part].deliver(*pair)
    if "in_proj" in sites:
        shifts = torch.cat([d.sum(1, dtype=sum_dtype(d.dtype)) for _, d in pairs], 1)
        sites["in_proj"].deliver(shifts, shifts)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add: minus infinity where a mask of booleans is true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
