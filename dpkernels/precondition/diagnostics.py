"""How good factors are: their spectra, and how far those from one source agree with another's.

What is computed from private records, an oracle's factors say, is not private: it is for finding
out on data that may be looked at, and must not be published or acted upon otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from dpkernels.precondition.estimate import Loss, estimate_moments
from dpkernels.precondition.moments import Estimation, LayerMoments
from dpkernels.precondition.probes import Probe

NOT_PRIVATE = "computed from private records: not private, must not be published"

# Of each layer by name: A ``[I, I]`` of the activations and G ``[O, O]`` of the errors; ``[I]`` or
# ``[O]`` where it is diagonal.
FactorPairs = Mapping[str, tuple[Tensor, Tensor]]


def factors_of(moments: Mapping[str, LayerMoments]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and G, without damping, of the layers that have both; ``Kfac.moments()`` has them.

    Not private if the probes are not.
    """
    both = {name: (x.activations, x.errors) for name, x in moments.items()}
    return {name: (a, g) for name, (a, g) in both.items() if a is not None and g is not None}


def estimate_factors(
    model: nn.Module,
    probe: Probe,
    loss: Loss,
    *,
    batches: int = 8,
    batch_size: int = 256,
    seed: int = 0,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and G of the model's layers at its present parameters, from one source.

    model: in private training or not; nothing of it changes. loss: a sum over samples, or ``[B]``.
    Not private if ``probe.not_private`` is not None. Raises as ``estimate_moments`` does.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = (probe.batch(batch_size, generator) for _ in range(batches))
    return factors_of(estimate_moments(model, drawn, loss, Estimation()))


def kronecker_spectrum(a: Tensor, g: Tensor) -> Tensor:
    """Return the eigenvalues of A (x) G, float64 ``[I * O]``, largest first (DP-KFC, eq. 48).

    a, g: matrices, or vectors for diagonals. Cost: eigenvalues of both, and a sort of their I * O
    products.
    """
    products = torch.outer(_eigenvalues(a), _eigenvalues(g))
    return products.flatten().sort(descending=True).values


def cosine(reference: Tensor, other: Tensor) -> float:
    """Return tr(C*^T C) / (|C*| |C|): 1 for the same directions, whatever the scale.

    NaN if one of them is zero.
    """
    x, y = reference.double(), other.double()
    return float((x * y).sum() / (x.norm() * y.norm()))


def relative_error(reference: Tensor, other: Tensor) -> float:
    """Return |C* - C| / |C*| in the Frobenius norm; NaN or infinite if C* is zero."""
    x, y = reference.double(), other.double()
    return float((x - y).norm() / x.norm())


@dataclass(frozen=True)
class Alignment:
    """One layer's factors from one source beside those from another (DP-KFC, Appendix G.1).

    cosine_f, error_f: of the whole block A (x) G, which is not formed: its inner products are those
    of the factors, multiplied. Not private if one of the sources is not.
    """

    cosine_a: float
    cosine_g: float
    cosine_f: float
    error_a: float
    error_g: float
    error_f: float


def align(reference: FactorPairs, other: FactorPairs) -> dict[str, Alignment]:
    """Return how far each layer's factors agree, relative to ``reference``.

    Raises ValueError for layers that differ, in name or shape.
    """
    if set(reference) != set(other):
        raise ValueError(
            f"align: reference and other must be of the same layers, got {sorted(reference)} and "
            f"{sorted(other)}"
        )
    for name in reference:
        shapes = [[list(x.shape) for x in factors[name]] for factors in (reference, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"align: A and G of layer {name!r} must be of the same shapes, got {shapes[0]} and "
                f"{shapes[1]}; estimate both alike, with all elements or diagonals"
            )
    return {name: _alignment(*reference[name], *other[name]) for name in reference}


def mean_alignment(rows: Sequence[Alignment]) -> Alignment:
    """Return the mean over the layers of a group (DP-KFC, Fig. 9); raises ValueError for none."""
    if not rows:
        raise ValueError("mean_alignment: rows must have layers, got none")
    table = torch.tensor([astuple(row) for row in rows], dtype=torch.float64)
    return Alignment(*table.mean(0).tolist())


def _alignment(a: Tensor, g: Tensor, other_a: Tensor, other_g: Tensor) -> Alignment:
    a, g, other_a, other_g = a.double(), g.double(), other_a.double(), other_g.double()
    cosine_a, cosine_g = cosine(a, other_a), cosine(g, other_g)
    # F* - F = (A* - A) (x) G* + A (x) (G* - G): squares of F* and F would cancel where they agree.
    off_a, off_g = a - other_a, g - other_g
    square = (
        off_a.square().sum() * g.square().sum()
        + 2 * (off_a * other_a).sum() * (g * off_g).sum()
        + other_a.square().sum() * off_g.square().sum()
    )
    return Alignment(
        cosine_a,
        cosine_g,
        cosine_a * cosine_g,
        relative_error(a, other_a),
        relative_error(g, other_g),
        float(square.clamp_min(0).sqrt() / (a.norm() * g.norm())),
    )


def _eigenvalues(x: Tensor) -> Tensor:
    values: Tensor = x.double() if x.dim() == 1 else torch.linalg.eigvalsh(x.double())
    return values
