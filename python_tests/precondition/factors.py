"""What factors should be: single-sample autograd through plain hooks, float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Fixed:
    """Probes that repeat the same few samples, whatever the generator."""

    not_private: str | None = None

    def __init__(self, inputs: Sequence[Tensor], targets: Tensor) -> None:
        self.inputs, self.targets = tuple(inputs), targets
        self.drawn = 0

    def describe(self) -> str:
        return "fixed samples"

    def batch(self, size: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        self.drawn += 1
        rows = torch.arange(size) % len(self.targets)
        return tuple(x[rows] for x in self.inputs), self.targets[rows]


class White:
    """White noise of a shape, and uniform labels, from the generator."""

    not_private: str | None = None

    def __init__(self, *shape: int, classes: int = 3) -> None:
        self.shape, self.classes = shape, classes

    def describe(self) -> str:
        return "white noise"

    def batch(self, size: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        x = torch.randn(size, *self.shape, generator=generator)
        return (x,), torch.randint(self.classes, (size,), generator=generator)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one loss for each sample; positions of a sample are added up first."""
    return functional.cross_entropy(outputs.flatten(1), targets, reduction="none")


def sample_moments(
    model: nn.Module, layer: nn.Module, probe: Fixed, sharing: str
) -> tuple[Tensor, Tensor]:
    """Return A (with a column for the bias) and G of ``layer``, from a loop over single samples."""
    rows, calls = ([], []), []
    hook = layer.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    for i in range(len(probe.targets)):
        calls.clear()
        inputs = (x[i : i + 1] for x in probe.inputs)
        loss = cross_entropy(model(*inputs), probe.targets[i : i + 1]).sum()
        errors = torch.autograd.grad(loss, [output for _, output in calls])
        a = torch.cat([_patches(layer, x) for x, _ in calls])
        d = torch.cat([_positions(layer, e) for e in errors])
        if sharing == "reduce":
            a, d = a.mean(0, keepdim=True), d.sum(0, keepdim=True)
        rows[0].append(torch.cat([a, torch.ones_like(a[:, :1])], 1).detach())
        rows[1].append(d)
    hook.remove()
    both = [torch.cat(side) for side in rows]
    return tuple(x.T @ x / len(x) for x in both)


def _patches(layer: nn.Module, x: Tensor) -> Tensor:
    """Return what the weight multiplies, ``[T, n]``, of one sample."""
    if isinstance(layer, nn.Conv2d):
        padded = x
        padding = layer.padding
        if layer.padding_mode != "zeros":
            around = layer._reversed_padding_repeated_twice
            padded, padding = functional.pad(x, around, mode=layer.padding_mode), 0
        columns = functional.unfold(
            padded, layer.kernel_size, layer.dilation, padding, layer.stride
        )
        return columns[0].T
    return x.reshape(-1, x.shape[-1])


def _positions(layer: nn.Module, errors: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return errors[0].flatten(1).T
    return errors.reshape(-1, errors.shape[-1])


def assert_close_at_scale(actual: Tensor, wanted: Tensor) -> None:
    """Assert equality but for float64 rounding, relative to the largest element."""
    assert actual.dtype == torch.float64
    scale = wanted.abs().max()
    assert scale > 0
    # torch's own tolerance for float64, at a scale of 1.
    torch.testing.assert_close(actual / scale, wanted / scale)
