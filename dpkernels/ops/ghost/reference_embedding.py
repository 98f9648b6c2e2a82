"""Per-sample norms and weighted sums of an embedding table's gradient in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels.ops.ghost.rounding import rounding_error


def embedding_sq_norms(
    indices: Tensor, errors: Tensor, scale: Tensor | None, vocabulary: int, padding_index: int
) -> Tensor:
    """``sum over distinct tokens v of scale_v^2 |sum over t with token v of errors_t|^2``, float64.

    Tokens are put in order, equal ones beside each other, and numbered within their sample; the
    errors of one number are added up. 2 B T D float64 numbers are held, whatever the vocabulary.
    """
    new, number, ordered, order = _runs(indices)
    places = number.unsqueeze(2).expand_as(errors)
    wide = _in_order(errors.double(), order)
    sums = torch.zeros_like(wide).scatter_add_(1, places, wide).abs()
    # Where all but nothing is left of the terms, what rounding took counts.
    error = torch.zeros_like(wide).scatter_add_(1, places, wide.abs())
    error *= rounding_error(torch.float64, errors.shape[1])
    sums = torch.where(error > 5e-8 * sums, sums + error, sums)
    # Every position of a token reads the same sum; only its first one counts.
    squares = sums.square().sum(2).gather(1, number)
    weights = new.double()
    if scale is not None:
        weights = weights * scale[ordered].square()
    return (squares * torch.where(ordered == padding_index, 0.0, weights)).sum(1)


def embedding_weighted_sum_(
    out: Tensor,
    indices: Tensor,
    errors: Tensor,
    factors: Tensor,
    scale: Tensor | None,
    padding_index: int,
    accumulate: bool,
) -> None:
    """``out[v] (+)= scale_v sum_b factors[b] sum over t with token v of errors[b, t]``.

    Rows are added up in float64 and rounded once: in float32 errors that cancel would round before
    they do, and norms know nothing of that; and a sample that goes would change the roundings of
    all partial sums after it.
    """
    new, number, ordered, order = _runs(indices)
    weights = factors.double().unsqueeze(1).expand(indices.shape)
    if scale is not None:
        weights = weights * scale[ordered]
    weights = torch.where(ordered == padding_index, 0, weights).unsqueeze(2)
    wide = torch.where(weights != 0, _in_order(errors.double(), order), 0)
    places = number.unsqueeze(2).expand_as(errors)
    sums = torch.zeros_like(wide).scatter_add_(1, places, wide).gather(1, places)
    # Every position of a token reads the same sum; only its first one adds it.
    rows = torch.where(new.unsqueeze(2), sums * weights, 0)
    total = out.double() if accumulate else torch.zeros_like(out, dtype=torch.float64)
    out.copy_(total.index_add(0, ordered.flatten(), rows.flatten(0, 1)))


def _runs(indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens ``[B, T]`` in order, equal ones beside each other.

    First: whether each begins a run of equal tokens; which run of its sample it is in; the tokens;
    and the positions that they come from.
    """
    ordered, order = indices.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return new, new.cumsum(1) - 1, ordered, order


def _in_order(errors: Tensor, order: Tensor) -> Tensor:
    return errors.gather(1, order.unsqueeze(2).expand_as(errors))
