"""Known noise is taken out of factors: what is left is semidefinite, and nearer to the truth."""

from __future__ import annotations

import math

import torch

from dpkernels.federated.noisy_factors import shrunken_diagonal, shrunken_spectrum
from dpkernels.federated.triangles import packed, packed_size, unpacked


def noisy(matrix, std, seed):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(packed_size(len(matrix)), generator=generator, dtype=torch.float64)
    return unpacked(packed(matrix[None])[0] + std * noise, len(matrix))


def spiked(size, spikes):
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(size, len(spikes), generator=generator, dtype=torch.float64)
    vectors = torch.linalg.qr(basis).Q
    return (vectors * torch.tensor(spikes, dtype=torch.float64)) @ vectors.mT


def test_noise_alone_has_its_eigenvalues_within_the_edge_and_becomes_a_multiple_of_the_identity():
    size, std = 150, 0.3
    seen = noisy(torch.zeros(size, size, dtype=torch.float64), std, 2)
    edge = std * math.sqrt(2 * size)
    # The largest is within n^(-2/3) of the edge, relatively (Tracy-Widom); 5 of these are enough.
    assert torch.linalg.eigvalsh(seen).abs().max() < edge * (1 + 2.5 * size ** (-2 / 3))
    found = shrunken_spectrum(seen, std)
    assert found.norm() < 0.2 * seen.norm()


def test_spikes_lose_what_noise_added_and_the_loss_is_the_least_of_their_kind():
    size, std = 200, 0.05
    edge = std * math.sqrt(2 * size)
    truth = spiked(size, [8 * edge, 3 * edge, 1.2 * edge])
    errors = {"noisy": [], "cut": [], "found": []}
    for seed in range(5):
        seen = noisy(truth, std, seed)
        values, vectors = torch.linalg.eigh(seen)
        cut = (vectors * torch.where(values > edge, values, 0.0)) @ vectors.mT
        found = shrunken_spectrum(seen, std)
        assert torch.linalg.eigvalsh(found).min() > -1e-12
        for name, one in (("noisy", seen), ("cut", cut), ("found", found)):
            errors[name].append(float((one - truth).norm()))
    mean = {name: sum(each) / len(each) for name, each in errors.items()}
    assert mean["found"] < mean["cut"] < mean["noisy"]


def test_without_noise_a_semidefinite_matrix_stays_and_negative_eigenvalues_go():
    truth = spiked(12, [3.0, 2.0, 1e-3])
    torch.testing.assert_close(shrunken_spectrum(truth, 0.0), truth, rtol=1e-12, atol=1e-14)
    negative = truth - spiked(12, [0.5, 0.0, 0.0])  # the same basis
    torch.testing.assert_close(
        shrunken_spectrum(negative - 2 * truth, 0.0),
        torch.zeros_like(truth),
        rtol=0,
        atol=1e-14,
    )


def test_the_trace_is_kept_where_there_is_more_of_it_than_noise():
    truth = spiked(30, [5.0, 1.0]) + 0.01 * torch.eye(30, dtype=torch.float64)
    seen = noisy(truth, 0.02, 3)
    torch.testing.assert_close(shrunken_spectrum(seen, 0.02).trace(), seen.trace())


def test_diagonals_are_shrunk_to_their_mean_and_never_negative():
    generator = torch.Generator().manual_seed(4)
    truth = torch.rand(4000, generator=generator, dtype=torch.float64) ** 6
    std = 0.3
    seen = truth + std * torch.randn(4000, generator=generator, dtype=torch.float64)
    found = shrunken_diagonal(seen, std)
    assert found.min() >= 0
    assert (found - truth).norm() < 0.8 * (seen.clamp(min=0) - truth).norm()
    torch.testing.assert_close(shrunken_diagonal(truth, 0.0), truth)
