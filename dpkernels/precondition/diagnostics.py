"""How good factors are, and what clipping and noise leave of a gradient.

None of this is private where it is computed from private records: it is for finding out, on data
that may be looked at, and must not be published or acted upon otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Of each layer by name: A ``[I, I]`` of the activations and G ``[O, O]`` of the errors.
Moments = Mapping[str, tuple[Tensor, Tensor]]


def kronecker_spectrum(a: Tensor, g: Tensor) -> Tensor:
    """Return the eigenvalues of A (x) G, float64 ``[I * O]``, largest first (DP-KFC, eq. 48).

    Cost: eigenvalues of both, and a sort of their I * O products.
    """
    products = torch.outer(torch.linalg.eigvalsh(a.double()), torch.linalg.eigvalsh(g.double()))
    return products.flatten().sort(descending=True).values


def cosine(reference: Tensor, other: Tensor) -> float:
    """Return tr(C*^T C) / (|C*| |C|): 1 for the same directions, whatever the scale."""
    x, y = reference.double(), other.double()
    return float((x * y).sum() / (x.norm() * y.norm()))


def relative_error(reference: Tensor, other: Tensor) -> float:
    """Return |C* - C| / |C*| in the Frobenius norm."""
    x, y = reference.double(), other.double()
    return float((x - y).norm() / x.norm())


@dataclass(frozen=True)
class Alignment:
    """One layer's factors from one source beside those from another (DP-KFC, Appendix G.1).

    cosine_f, error_f: of the whole block A (x) G, which is not formed: its inner products are those
    of the factors, multiplied.
    """

    cosine_a: float
    cosine_g: float
    cosine_f: float
    error_a: float
    error_g: float
    error_f: float


def align(reference: Moments, other: Moments) -> dict[str, Alignment]:
    """Return how far each layer's factors agree; raise ValueError for layers that differ."""
    if set(reference) != set(other):
        raise ValueError(
            f"align: reference and other must be of the same layers, got {sorted(reference)} and "
            f"{sorted(other)}"
        )
    return {name: _alignment(*reference[name], *other[name]) for name in reference}


def _alignment(a: Tensor, g: Tensor, other_a: Tensor, other_g: Tensor) -> Alignment:
    a, g, other_a, other_g = a.double(), g.double(), other_a.double(), other_g.double()
    square = a.square().sum() * g.square().sum()
    product = (a * other_a).sum() * (g * other_g).sum()
    other_square = other_a.square().sum() * other_g.square().sum()
    difference = (square - 2 * product + other_square).clamp_min(0)
    return Alignment(
        cosine(a, other_a),
        cosine(g, other_g),
        float(product / (square * other_square).sqrt()),
        relative_error(a, other_a),
        relative_error(g, other_g),
        float((difference / square).sqrt()),
    )


def signal_to_noise(signals: Mapping[str, Tensor], noise_std: float) -> dict[str, float]:
    """Return |signal| / |noise| of each layer, the latter as expected: noise_std sqrt(elements).

    signals: of each layer the mean clipped gradient without noise, of any shape. Not private.
    noise_std: of the noise on every element: sigma * sensitivity / expected batch size.
    """
    if noise_std <= 0:
        raise ValueError(f"signal_to_noise: noise_std must be > 0, got {noise_std}")
    return {
        name: float(signal.double().norm()) / (noise_std * signal.numel() ** 0.5)
        for name, signal in signals.items()
    }


def clipped_fraction(sample_norms: Mapping[str, Tensor], max_norm: float) -> float:
    """Return the part of the samples whose gradient is longer than the bound.

    sample_norms: ``[B]`` for each layer, as ``PrivateTraining.sample_norms()`` has them. Not
    private. Raises ValueError if there are no samples.
    """
    norms = [norms.double() for norms in sample_norms.values()]
    if not norms or not norms[0].numel():
        raise ValueError("clipped_fraction: sample_norms must have samples, got none")
    total = torch.stack(norms).square().sum(0).sqrt()
    return float((total > max_norm).double().mean())
