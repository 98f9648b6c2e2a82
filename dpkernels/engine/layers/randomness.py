"""Random numbers of a forward pass, kept so that a repeated pass can use the same ones.

Dropout and stochastic depth draw one mask for a whole batch. A pass that repeats the module for
each sample must use that sample's part of it, or it computes the gradient of another function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Functions that return random numbers of a given size, or of the size of a tensor.
_DRAWS = frozenset({torch.rand, torch.randn, torch.rand_like, torch.randn_like})


class Randomness(TorchFunctionMode):
    """Makes every random choice inside of ``with`` through ``drawn``; the arithmetic is torch's.

    Covered are dropout of elements, that of attention, and ``torch.rand`` and its like. Others draw
    as ever.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func``, with random numbers from ``drawn``."""
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func in _DRAWS:
            with torch._C.DisableTorchFunction():
                size = func(*args, **{**kwargs, "device": "meta", "generator": None}).shape
            return self.drawn(size, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def drawn(self, size: torch.Size, draw: Callable[[], Tensor]) -> Tensor:
        """Return random numbers of ``size``, as ``draw`` would."""
        raise NotImplementedError

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        kept = self.drawn(input.shape, lambda: torch.empty_like(input).bernoulli_(1 - p))
        # All dropped: 0 times what is left, which is nothing.
        scale = kept.div(1 - p) if p < 1 else kept
        return input.mul_(scale) if inplace else input * scale

    def _attention(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if dropout_p == 0:
            how = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
            return func(query, key, value, **how, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value)
            )
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value


class Recorded(Randomness):
    """Keeps what is drawn; so do others around it, of which torch asks the innermost alone."""

    _around: ClassVar[list[Recorded]] = []

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Tensor] = []

    def __enter__(self) -> Recorded:
        self._around.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def drawn(self, size: torch.Size, draw: Callable[[], Tensor]) -> Tensor:
        """Draw, and keep a copy, because what follows may change it in place."""
        with torch._C.DisableTorchFunction():
            found = draw()
            for recorded in self._around:
                recorded.numbers.append(found.clone())
        return found


class Replayed(Randomness):
    """Gives one sample its part of what was drawn for all of them.

    numbers: what was recorded, in its order. index: which sample: an integer, or a tensor of one,
    over which ``vmap`` may map. batch: how many there are.
    """

    def __init__(self, numbers: Sequence[Tensor], index: int | Tensor, batch: int) -> None:
        super().__init__()
        self._numbers: Iterator[Tensor] = iter(numbers)
        self._index, self._batch = index, batch

    def drawn(self, size: torch.Size, draw: Callable[[], Tensor]) -> Tensor:
        """Return the sample's rows, or all if the numbers are the same for all samples.

        Raises RuntimeError for a size that fits neither.
        """
        found = next(self._numbers, None)
        if found is None:
            raise RuntimeError("a sample alone draws more random numbers than the batch does")
        if found.shape == size:
            return found.clone()
        if not size or found.shape != (self._batch * size[0], *size[1:]):
            raise RuntimeError(
                f"a sample alone draws random numbers {list(size)}, the batch {list(found.shape)}"
            )
        rows = found.view(self._batch, *size)
        if isinstance(self._index, int):
            return rows[self._index].clone()
        return rows.index_select(0, self._index.view(1)).squeeze(0)
