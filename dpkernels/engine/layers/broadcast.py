"""Parameters of a user's own module, replaced by one copy for each sample.

A parameter p that a module uses elementwise (a scale, a shift, positions, a class token) may as
well be ``[B, 1, ..., 1, *p.shape]``, B equal copies: the module broadcasts them, and autograd's
gradient of the copies is the gradient of every sample. That holds only if output i depends on copy
i alone, which is tried out, without autograd, before it is relied on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpkernels.engine.capture import Site
from dpkernels.engine.layers.layer import Unsupported
from dpkernels.engine.layers.linear import computing_dtype
from dpkernels.engine.layers.stored import StoredLayer
from dpkernels.ops.ghost.layer import sum_dtype

# Runs that do the same arithmetic on a sample may differ by so many roundings of the output.
_ULPS = 8

Shapes = tuple[tuple[int, ...], ...]


class PerSample(torch.autograd.Function):
    """Copies of parameters whose backward pass delivers per-sample gradients to a site."""

    @staticmethod
    def forward(ctx: Any, site: Site, shapes: Shapes, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return ``[B, ...]`` of each, which take no memory of their own."""
        ctx.site, ctx.shapes = site, [p.shape for p in parameters]
        return tuple(_copies(p, shape) for p, shape in zip(parameters, shapes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        """Deliver ``[B, *shape]`` of each; parameters get no gradient from autograd."""
        pairs = zip(gradients, ctx.shapes, strict=True)
        ctx.site.deliver(*(g.reshape(g.shape[0], *shape) for g, shape in pairs))
        return (None, None, *(None for _ in gradients))


per_sample: Callable[..., tuple[Tensor, ...]] = PerSample.apply


def broadcast_forward(
    layer: StoredLayer,
    site: Site,
    plain: Callable[..., Any],
    shapes: Shapes,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compute the module's output with copies of ``shapes`` in place of its parameters."""
    copies = per_sample(site, shapes, *layer.slots.values())
    with layer.slots.replaced(copies):
        return plain(*args, **kwargs)


def find_shapes(
    layer: StoredLayer,
    plain: Callable[..., Any],
    batch: int,
    rank: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Shapes | None:
    """Return shapes of copies that the module takes for what they are, or None.

    rank: number of axes of its first input. Up to 10 runs of the module, without autograd. Raises
    Unsupported for a module that changes its buffers.
    """
    trial = Trial(layer, plain, batch, args, kwargs)
    sizes = [p.shape for p in layer.parameters.values()]
    layouts = [
        tuple(_copy_shape(size, batch, rank, leading) for size in sizes)
        for leading in (True, False)
    ]
    return next((shapes for shapes in dict.fromkeys(layouts) if trial.accepts(shapes)), None)


@contextmanager
def unchanged_buffers(described: str, module: nn.Module) -> Iterator[None]:
    """Put all buffers of a module back, and raise Unsupported if they had changed."""
    kept = [
        (owner._buffers, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    changed = False
    try:
        yield
    finally:
        for buffers, name, buffer, value in kept:
            if buffers.get(name) is not buffer or not torch.equal(buffer, value):
                changed = True
                buffers[name] = buffer
                buffer.copy_(value)
    if changed:
        raise changed_buffers(described)


def changed_buffers(described: str) -> Unsupported:
    """Return the refusal of a module that keeps running state."""
    return Unsupported(
        f"{described}: its forward pass changes its buffers, which may carry samples out of "
        "the training without noise; keep no running state in a module that is trained"
    )


def agree(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two runs, with arithmetic in different order, mean the same outputs."""
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and _close(a, b, _beyond_rounding(b))
        for a, b in zip(first, second, strict=True)
    )


def _beyond_rounding(x: Tensor) -> float:
    """Return a part of the largest element that rounding stays below, and other meanings exceed.

    The cube root of eps: 0.005 for float32, which rounding to TF32 does not reach either.
    """
    return math.cbrt(torch.finfo(computing_dtype(x)).eps) if x.is_floating_point() else 0.0


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether elements differ by at most ``tolerance`` times the largest of them."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0, atol=tolerance * _largest(b), equal_nan=True)


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _copy_shape(shape: Sequence[int], batch: int, rank: int, leading: bool) -> tuple[int, ...]:
    """Return the shape of copies: as many axes as the input has, samples first.

    leading: let samples take the place of a leading axis of 1: a token ``[1, 1, D]``, positions
        ``[1, T, D]``.
    """
    if leading and len(shape) > 1 and shape[0] == 1:
        return (batch, *shape[1:])
    return (batch, *[1] * (rank - 1 - len(shape)), *shape)


def _copies(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    return parameter.reshape(1, *shape[1:]).expand(shape)


@contextmanager
def random_state_kept(layer: StoredLayer) -> Iterator[None]:
    """Leave the generators of the CPU and of the parameters' GPUs as they were."""
    with torch.random.fork_rng(_gpus(layer)):
        yield


def _random_states(layer: StoredLayer) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _gpus(layer))]


def _gpus(layer: StoredLayer) -> list[torch.device]:
    devices = (p.device for p in layer.parameters.values())
    return list(dict.fromkeys(device for device in devices if device.type == "cuda"))


@dataclass
class Trial:
    """Runs of a module, without autograd, that leave inputs and random numbers as they were."""

    layer: StoredLayer
    plain: Callable[..., Any]
    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    drawn: bool = False  # whether a run drew random numbers

    def accepts(self, shapes: Shapes) -> bool:
        """Return whether output i depends on sample i and copy i alone, and means the same.

        Copies of two random values, and a mix of them: output i of the mix must be output i of the
        one that copy i is of. Outputs of a part of the batch must be those of the whole batch,
        so that neither other samples nor their number matter; that cannot be asked of a module
        that draws random numbers.
        """
        generator = torch.Generator()
        values = [_perturbed(self.layer.slots.values(), generator) for _ in range(2)]
        chosen = torch.randperm(self.batch, generator=generator) % 2 == 1
        rows = [
            [_copies(p, shape) for p, shape in zip(value, shapes, strict=True)] for value in values
        ]
        part = (self.batch + 1) // 2
        try:
            wanted = self._run(values[0])
            with unchanged_buffers(self.layer.describe(), self.layer.module):
                one, other = self._run(rows[0]), self._run(rows[1])
                mixed = self._run([_where(chosen, b, a) for a, b in zip(*rows, strict=True)])
                few = wanted if self.drawn else self._run([p[:part] for p in rows[0]], part)
        except Unsupported:
            raise
        except Exception:
            # Whatever the module has against copies, the other rule is there.
            return False
        if not all(isinstance(y, Tensor) for y in (*wanted, *one, *other, *mixed, *few)):
            return False
        return (
            agree(one, wanted)
            and agree(few, wanted if self.drawn else self._of_samples(wanted, part))
            and len(mixed) == len(one) == len(other)
            and all(_is_mix(*ys, chosen) for ys in zip(mixed, one, other, strict=True))
        )

    def _run(self, tensors: Sequence[Tensor], samples: int | None = None) -> list[Any]:
        """Return the leaves of the output with ``tensors`` as the parameters.

        samples: how many of them to go in; None: all. Random numbers are the same in every run.
        """
        given = tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x, (self.args, self.kwargs)
        )
        leaves, structure = tree_flatten(given)
        args, kwargs = tree_unflatten(self._of_samples(leaves, samples), structure)
        with (
            torch.no_grad(),
            random_state_kept(self.layer),
            warnings.catch_warnings(),
            self.layer.slots.replaced(tensors),
        ):
            # What copies are warned about is no fault of the user's.
            warnings.simplefilter("ignore")
            before = _random_states(self.layer)
            output = self.plain(*args, **kwargs)
            after = _random_states(self.layer)
        self.drawn |= not all(map(torch.equal, before, after))
        return [y for y in tree_leaves(output) if y is not None]

    def _of_samples(self, leaves: Sequence[Any], samples: int | None) -> list[Any]:
        """Return leaves with only the first ``samples`` of tensors that have samples."""
        return [
            x[:samples] if isinstance(x, Tensor) and x.shape[:1] == (self.batch,) else x
            for x in leaves
        ]


def _perturbed(parameters: Iterable[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return parameters plus noise of size 1: zeros, as in LoRA, would hide what they do."""
    return [
        p.detach() + torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        for p in parameters
    ]


def _where(chosen: Tensor, this: Tensor, that: Tensor) -> Tensor:
    rows = chosen.to(this.device).view(-1, *[1] * (this.dim() - 1))
    return torch.where(rows, this, that)


def _is_mix(mixed: Tensor, one: Tensor, other: Tensor, chosen: Tensor) -> bool:
    """Return whether rows of an output are those chosen from two others."""
    if torch.equal(mixed, one) and torch.equal(one, other):
        return True  # nothing to do with the parameters
    if mixed.shape[:1] != chosen.shape or not mixed.is_floating_point():
        return False
    # For half precision this is bit for bit: one of its roundings could hide a lot.
    tolerance = _ULPS * torch.finfo(sum_dtype(mixed.dtype)).eps
    visible = _largest(other - one) > _ULPS * tolerance * _largest(one)
    return visible and _close(mixed, _where(chosen, other, one), tolerance)
