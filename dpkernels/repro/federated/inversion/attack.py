"""Deep leakage from gradients: the image whose gradient points where the upload does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# Of L-BFGS. 300 iterations recover CIFAR-10 images at 31 dB with 10 pairs, at 34 with 30, at 38
# with 100, which are 2.5 MB.
_HISTORY = 100
# Evaluations for each iteration, at most: the line search needs 1.02 on average.
_EVALUATIONS = 1.25


@dataclass(frozen=True)
class Recovered:
    """What an attacker takes for a client's record.

    image: ``[*shape]``, in the model's input units. label: the likeliest class.
    loss: ``|g / |g| - u / |u||^2`` of the image's gradient g and what was seen, u: 0 where they are
        parallel, 2 where they have nothing in common. It is all that tells an attacker success.
    """

    image: Tensor
    label: int
    loss: float


def label_of(model: nn.Module, seen: Tensor) -> int:
    """Return the label of the one record behind the gradient ``seen``, ``[D]`` (after iDLG).

    Row c of the last layer's weights has gradient ``(p_c - [c = y]) a``. Activations a that are not
    negative (sigmoid, ReLU) make the label's row the only one with a negative sum. Without noise
    that is exact; with noise N(0, s^2) on ``seen`` the sum's signal grows with the features, its
    noise with their root alone.

    Raises ValueError if the model does not end in a linear layer.
    """
    weights = list(model.parameters())
    bias = weights.pop().numel() if weights[-1].dim() == 1 else 0
    last = weights[-1]
    if last.dim() != 2:
        raise ValueError(
            f"label_of: the model must end in a linear layer [classes, features], got "
            f"{list(last.shape)}; leave the label to the attack"
        )
    end = len(seen) - bias
    return int(seen[end - last.numel() : end].view_as(last).sum(1).argmin())


def invert(
    model: nn.Module,
    seen: Tensor,
    shape: Sequence[int],
    classes: int,
    *,
    iterations: int = 300,
    restarts: int = 2,
    label: int | None = None,
    seed: int = 0,
) -> Recovered:
    """Return the record whose gradient has the direction of ``seen``.

    model: with the parameters that were broadcast; twice differentiable (sigmoid, not ReLU).
    seen: ``[D]``, what the server takes for a multiple of the gradient of one record's
        cross-entropy. Its length is not used: a clip has changed it.
    shape: of one input. label: if it is known (``label_of``); else a soft label is sought as well.
    iterations: of L-BFGS. restarts: from other random images; the least loss counts.

    300 iterations of a LeNet take 1.5 s on one core, whatever is found.
    """
    weights = list(model.parameters())
    target = seen / torch.linalg.vector_norm(seen)
    generator = torch.Generator().manual_seed(seed)
    found = [
        _descend(model, weights, target, start, classes, label, iterations)
        for start in torch.randn(restarts, 1, *shape, generator=generator).to(seen.dtype)
    ]
    # A line search that overflowed has a loss that is not a number, and counts last.
    return min(found, key=lambda one: math.inf if math.isnan(one.loss) else one.loss)


def _descend(
    model: nn.Module,
    weights: list[nn.Parameter],
    target: Tensor,
    start: Tensor,
    classes: int,
    label: int | None,
    iterations: int,
) -> Recovered:
    image = start.clone().requires_grad_()
    logits = torch.zeros(1, classes, dtype=start.dtype)
    sought = [image]
    if label is None:
        sought.append(logits.requires_grad_())
    else:
        logits[0, label] = math.inf  # a soft-max of 1
    optimizer = torch.optim.LBFGS(
        sought,
        max_iter=iterations,
        max_eval=math.ceil(_EVALUATIONS * iterations),
        history_size=_HISTORY,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def mismatch() -> Tensor:
        truth = logits.softmax(1) if label is None else torch.tensor([label])
        parts = torch.autograd.grad(cross_entropy(model(image), truth), weights, create_graph=True)
        gradient = torch.cat([part.flatten() for part in parts])
        apart: Tensor = gradient / torch.linalg.vector_norm(gradient) - target
        return apart.square().sum()

    def closure() -> float:
        optimizer.zero_grad()
        loss = mismatch()
        loss.backward(inputs=sought)
        return loss.item()

    optimizer.step(closure)
    return Recovered(image.detach()[0], int(logits.argmax()), mismatch().item())


def mse(image: Tensor, original: Tensor) -> float:
    """Return the mean squared difference of two images of the same shape."""
    return (image.double() - original.double()).square().mean().item()


def psnr(image: Tensor, original: Tensor) -> float:
    """Return ``10 log10(1 / mse)`` in dB, of pixels in [0, 1]; infinite where they are equal."""
    error = mse(image, original)
    return -10 * math.log10(error) if error else math.inf
