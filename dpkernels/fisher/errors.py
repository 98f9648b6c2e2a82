"""Errors d of a model's outputs, such that E[d d^T] is what the model's own labels make it.

The score of a record is J^T d, with J the Jacobian of its outputs. Its Fisher information is
J^T S J, with S = diag(p) - p p^T for cross-entropy over classes with probabilities p, and S = I
for half the squared error. Any d with E[d d^T] = S will do; each form below is a sequence of
them whose *mean* of d d^T is S, exactly or in expectation:

``exact``       one for each column of a root of S, as many backward passes: classes - 1, because
                S has no more than that in its rank, or outputs.
``sampled``     one: y drawn from the model, d = p - e_y, or N(0, I).
``rademacher``  one: d = (diag(sqrt p) - p sqrt(p)^T) v, or v, of independent signs v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from dpkernels.ops.ghost.layer import sum_dtype

Expectation = Literal["exact", "sampled", "rademacher"]
Loss = Literal["cross_entropy", "squared"]
# Takes the outputs of a batch, and yields their errors: of the outputs' shape and dtype.
Errors = Callable[[Tensor], Iterator[Tensor]]


def output_errors(loss: Loss, expectation: Expectation, generator: Generator) -> Errors:
    """Return what makes errors of outputs: ``[B, C]`` logits, or ``[B, ...]`` for ``squared``.

    generator: what ``sampled`` and ``rademacher`` draw from, record after record: how records are
        cut into batches does not change what a record gets (on a CPU).

    Raises ValueError for unknown names, and on outputs of another shape.
    """
    for name, value, choices in (
        ("loss", loss, get_args(Loss)),
        ("expectation", expectation, get_args(Expectation)),
    ):
        if value not in choices:
            raise ValueError(
                f"fisher_information: {name} must be one of {', '.join(choices)}, got {value!r}"
            )
    return partial(_of_logits if loss == "cross_entropy" else _of_values, expectation, generator)


def _of_logits(how: Expectation, generator: Generator, logits: Tensor) -> Iterator[Tensor]:
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(
            "fisher_information: for cross_entropy a model must return logits [records, classes] "
            f"of at least 2 classes, got {list(logits.shape)}; let it return one row for each "
            "record, or take loss='squared'"
        )
    log_p = logits.detach().to(sum_dtype(logits.dtype)).log_softmax(1)
    if how == "exact":
        found = exact_errors(log_p)
    elif how == "sampled":
        u = torch.rand(len(log_p), generator=generator, dtype=torch.float64, device=_on(generator))
        found = iter([sampled_errors(log_p, u.to(log_p.device))])
    else:
        found = iter([sign_errors(log_p, signs(log_p, generator))])
    return (d.to(logits.dtype) for d in found)


def _of_values(how: Expectation, generator: Generator, values: Tensor) -> Iterator[Tensor]:
    if values.dim() == 0:
        raise ValueError(
            "fisher_information: a model must return outputs [records, ...], got one number"
        )
    if how == "sampled":
        u = torch.rand(
            values.shape, generator=generator, dtype=torch.float64, device=_on(generator)
        )
        # ``randn`` draws several at a time, so that its numbers depend on how many are asked for.
        yield torch.special.ndtri(u.clamp_(min=2.0**-54)).to(values)
    elif how == "rademacher":
        yield signs(values, generator)
    else:
        outputs = values[0].numel() if len(values) else 0
        for k in range(outputs):
            d = torch.zeros_like(values).view(len(values), -1)
            d[:, k] = outputs**0.5
            yield d.view(values.shape)


def exact_errors(log_p: Tensor) -> Iterator[Tensor]:
    """Yield C - 1 errors ``[B, C]`` whose mean of d d^T is diag(p) - p p^T.

    log_p: ``[B, C]``, logarithms of the probabilities.

    With s = sqrt(p), the root (diag(s) - p s^T) has s in its kernel. The reflection that takes the
    first axis to -s turns that column to zero; the others become, for k = 2 to C,
    d_k = s_k ((e_k - p) - s_1 / (1 + s_1) (e_1 - p)). Nothing is subtracted under a root.
    """
    classes = log_p.shape[1]
    p, s = log_p.exp(), (log_p / 2).exp()
    first = s[:, :1] / (1 + s[:, :1])
    rest = (first - 1) * p
    rest[:, :1] -= first
    for k in range(1, classes):
        d = rest.clone()
        d[:, k] += 1
        yield d.mul_(s[:, k : k + 1] * (classes - 1) ** 0.5)


def sampled_errors(log_p: Tensor, u: Tensor) -> Tensor:
    """Return p - e_y ``[B, C]`` with the label y that uniform numbers u ``[B]`` choose."""
    # The sums are rounded: u is brought below the last of them.
    sums = log_p.double().exp().cumsum(1)
    labels = torch.searchsorted(sums, u.unsqueeze(1) * sums[:, -1:], right=True)
    labels = labels.clamp_(max=log_p.shape[1] - 1)
    return log_p.exp().scatter_add_(1, labels, -torch.ones_like(log_p[:, :1]))


def sign_errors(log_p: Tensor, v: Tensor) -> Tensor:
    """Return (diag(s) - p s^T) v ``[B, C]`` with s = sqrt(p), for signs v ``[B, C]``.

    E[v v^T] = I makes E[d d^T] = (diag(s) - p s^T)(diag(s) - s p^T) = diag(p) - p p^T.
    """
    sv = (log_p / 2).exp() * v
    return sv - log_p.exp() * sv.sum(1, keepdim=True)


def signs(like: Tensor, generator: Generator) -> Tensor:
    """Return independent signs, in shape, dtype and device as ``like``."""
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=_on(generator))
    return drawn.mul_(2).sub_(1).to(like)


def _on(generator: Generator) -> torch.device:
    return generator.device
