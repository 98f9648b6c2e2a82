"""Shrinkers of singular values: what they compute, on every backend, and what FedCEO proves.

``test_tsvd_optimality`` has Theorem 3.1 for one threshold; here it is one for each frequency.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dpkernels
from dpkernels.ops import tsvd
from dpkernels.ops.tsvd import Hard, Optimal, Shrinker, Soft
from python_tests.ops import tsvd_cases as cases
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("tsvd_shrink", "tsvd_soft_threshold")
KINDS = ("soft", "hard", "optimal", "margin")


def shrinker(kind: str, x: Tensor, quantile: float = 0.5) -> Shrinker:
    """Return a shrinker of this kind that cuts in a gap between the singular values of ``x``."""
    cut = cases.threshold_between(x, quantile)
    edge = math.sqrt(x.shape[0]) + math.sqrt(x.shape[1])
    makers = {
        "soft": lambda: Soft(cut),
        "hard": lambda: Hard(cut),
        "optimal": lambda: Optimal(cut / edge),
        "margin": lambda: Optimal(cut / (edge + 1.5), margin=1.5),
    }
    return makers[kind]()


def by_definition(x: Tensor, by: Shrinker) -> Tensor:
    """Return the result from the complex SVD of every slice of the full transform, in float64."""
    d, h, count = x.shape
    slices = torch.fft.fft(x.double(), dim=2)
    half = torch.linalg.svdvals(slices[..., : count // 2 + 1].permute(2, 0, 1))
    shrunk = by(half, d, h)
    for k in range(count):
        u, _, vh = torch.linalg.svd(slices[..., k], full_matrices=False)
        slices[..., k] = (u * shrunk[min(k, count - k)]) @ vh
    return torch.fft.ifft(slices, dim=2).real


def check(tensors: list[Tensor], by: list[Shrinker]) -> None:
    """Assert that float32 tensors are shrunk as accurately as in plain PyTorch."""
    found = tsvd.shrink(tensors, by)
    with dpkernels.use_backend("reference"):
        plain = tsvd.shrink(tensors, by)
    exact = [by_definition(x, f) for x, f in zip(tensors, by, strict=True)]
    flat = [
        torch.cat([x.flatten() for x in part]) for part in (found.tensors, plain.tensors, exact)
    ]
    assert_as_accurate(*flat)
    assert all(map(torch.equal, found.kept, plain.kept))


def gavish_donoho(s: Tensor, d: int, h: int, noise: float) -> Tensor:
    """Return the optimal shrinker as it is in the paper."""
    beta, scale = min(d, h) / max(d, h), noise * math.sqrt(max(d, h))
    y = s / scale
    root = ((y**2 - beta - 1) ** 2 - 4 * beta).clamp(min=0).sqrt()
    return torch.where(y > 1 + math.sqrt(beta), scale * root / y, 0.0)


@pytest.mark.parametrize(("d", "h"), [(1, 1), (1, 9), (30, 7), (20, 20)])
def test_the_formulas(d: int, h: int) -> None:
    s = torch.linspace(0, 20, 401, dtype=torch.float64)
    assert torch.allclose(Soft(3.01)(s, d, h), (s - 3.01).clamp(min=0), rtol=1e-14, atol=1e-14)
    assert torch.equal(Hard(3.01)(s, d, h), torch.where(s > 3.01, s, 0.0))
    exact = gavish_donoho(s, d, h, 0.71)
    # The paper's form cancels: an ulp of y^4 under the root.
    assert torch.allclose(Optimal(0.71)(s, d, h), exact, rtol=1e-11, atol=1e-6)
    cut = 0.71 * (math.sqrt(d) + math.sqrt(h) + 2)
    with_margin = Optimal(0.71, margin=2.0)(s, d, h)
    assert torch.equal(with_margin, torch.where(s > cut, Optimal(0.71)(s, d, h), 0.0))


def test_the_optimal_shrinker_is_as_steep_at_its_edge_as_it_says() -> None:
    for d, h in ((1, 1), (5, 50), (40, 40), (64, 784)):
        noise = 0.3
        edge = noise * (math.sqrt(d) + math.sqrt(h))
        off = edge * 10.0 ** -torch.arange(3, 12, dtype=torch.float64)
        value = Optimal(noise)(edge + off, d, h)
        assert (value <= 2.01 * (off * noise * math.sqrt(max(d, h))).sqrt()).all()
        assert (value > off).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_shrinks_the_singular_values(backend: str, kind: str) -> None:
    tensors = [cases.clients(*shape) for shape in cases.SHAPES]
    check(tensors, [shrinker(kind, x) for x in tensors])


@given(
    shape=st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9)),
    quantile=st.floats(0, 1),
    kind=st.sampled_from(KINDS),
)
def test_any_shape(cpp: str, shape: tuple[int, int, int], quantile: float, kind: str) -> None:
    # The second tensor sets the scale of what plain PyTorch's error is.
    tensors = [cases.clients(*shape), cases.clients(20, 19, 4)]
    check(tensors, [shrinker(kind, x, quantile) for x in tensors])


@pytest.mark.parametrize("cut", [1e-9, 1e-30])
@pytest.mark.parametrize("kind", ["soft", "hard", "optimal"])
def test_cuts_below_the_bound_of_the_gram_matrix(backend: str, kind: str, cut: float) -> None:
    x = cases.clients(15, 8, 4)
    by = {"soft": Soft(cut), "hard": Hard(cut), "optimal": Optimal(cut)}[kind]
    check([x], [by])


@pytest.mark.parametrize("count", [1, 2, 5, 6])
@pytest.mark.parametrize("maker", [Soft, Hard, Optimal])
def test_a_number_for_each_frequency(
    backend: str, maker: type[Soft] | type[Hard] | type[Optimal], count: int
) -> None:
    tensors = [
        cases.clients(14, 9, count),
        cases.clients(1, 12, count),
        cases.clients(7, 20, count),
    ]
    by = []
    for x in tensors:
        values = cases.exact_values(x)[: count // 2 + 1]
        # In the middle between two singular values, another two in every slice.
        middles = 0.5 * (values + torch.nn.functional.pad(values, (0, 1))[:, 1:])
        cut = torch.stack([row[k % len(row)] for k, row in enumerate(middles)])
        cut[1:2] = 0.0  # one frequency stays as it is
        edge = math.sqrt(x.shape[0]) + math.sqrt(x.shape[1])
        by.append(maker(cut / edge if maker is Optimal else cut))
    check(tensors, list(by))
    kept = tsvd.shrink(tensors, by).kept
    assert all(
        k[1].item() == min(x.shape[:2]) for k, x in zip(kept, tensors, strict=True) if count > 1
    )


def test_soft_threshold_takes_a_number_for_each_frequency(backend: str) -> None:
    tensors = [cases.clients(9, 6, 5), cases.clients(4, 8, 2)]
    taus = [torch.tensor([2.0, 0.0, 3.0]), torch.tensor([1.0, 2.0])]
    found = tsvd.soft_threshold(tensors, taus)
    shrunk = tsvd.shrink(tensors, [Soft(tau) for tau in taus])
    assert all(map(torch.equal, found.tensors, shrunk.tensors))
    assert all(map(torch.equal, found.kept, shrunk.kept))
    mixed = tsvd.soft_threshold(tensors, [taus[0], 1.5])
    assert torch.equal(mixed.tensors[0], found.tensors[0])
    assert torch.equal(mixed.kept[1], tsvd.soft_threshold(tensors[1], 1.5).kept)
    alone = tsvd.soft_threshold(tensors[0], taus[0])
    assert torch.equal(alone.tensors, found.tensors[0])


def test_matrices_are_tensors_of_one_client(backend: str) -> None:
    matrices = [cases.clients(12, 7, 1)[..., 0], cases.clients(3, 8, 1)[..., 0].T]
    found = tsvd.shrink_matrices(matrices, Hard(2.0))
    for matrix, out in zip(matrices, found, strict=True):
        assert torch.equal(out, tsvd.shrink(matrix.unsqueeze(2), Hard(2.0)).tensors[..., 0])
        assert torch.equal(out, tsvd.shrink_matrices(matrix, Hard(2.0)))


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_theorem_3_1_with_a_threshold_for_each_frequency(count: int) -> None:
    # argmin_W |W - W_N|_F^2 / 2 + sum_k tau_k |F_k|_* / K, conjugate slices with equal tau.
    noisy = cases.clients(7, 6, count, torch.float64)
    tau = torch.linspace(1.0, 4.0, count // 2 + 1, dtype=torch.float64)
    full = tau[[min(k, count - k) for k in range(count)]]
    best = tsvd.soft_threshold(noisy, tau).tensors

    def slices(w: Tensor) -> Tensor:
        return torch.fft.fft(w, dim=2).permute(2, 0, 1)

    def objective(w: Tensor) -> float:
        nuclear = (full * torch.linalg.svdvals(slices(w)).sum(1)).sum() / count
        return (0.5 * (w - noisy).square().sum() + nuclear).item()

    least = objective(best)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-4, 1e-2, 1.0):
        for _ in range(20):
            step = size * torch.randn(noisy.shape, generator=generator, dtype=torch.float64)
            # Strongly convex: it rises at least by |step|^2 / 2.
            rise = 0.5 * step.square().sum().item()
            assert objective(best + step) >= least + rise - 1e-13 * least
    # Z is a subgradient of tau_k |F|_* at F if |Z| <= tau_k and <Z, F> = tau_k |F|_*.
    residual = slices(noisy) - slices(best)
    assert (torch.linalg.svdvals(residual)[:, 0] <= full * (1 + 1e-12)).all()
    product = (residual.conj() * slices(best)).real.sum((1, 2))
    torch.testing.assert_close(product, full * torch.linalg.svdvals(slices(best)).sum(1))


def test_proposition_3_2_slices_become_the_truncated_svd_of_the_mean(backend: str) -> None:
    count = 6
    common, own = cases.clients(12, 8, 1), cases.clients(12, 8, count)
    x = common + 0.01 * own
    values = cases.exact_values(x)
    tau = 0.5 * (values[0, 3] + values[0, 4]).item()
    assert values[1:].max() < tau, "the threshold must exceed all of frequencies > 0"
    u, s, vh = torch.linalg.svd(x.double().mean(2), full_matrices=False)
    for by in (Soft(tau), Hard(tau)):
        # s of the mean is that of slice 0 over K.
        exact = (u * (by(count * s, 12, 8) / count)) @ vh
        exact = exact.unsqueeze(2).expand(12, 8, count)
        out, kept = tsvd.shrink(x, by)
        with dpkernels.use_backend("reference"):
            plain = tsvd.shrink(x, by).tensors
        assert kept.tolist() == [4, 0, 0, 0]
        assert_as_accurate(out, plain, exact)


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9)),
    quantile=st.floats(0, 1),
)
def test_the_mean_of_the_slices_is_the_mean_thresholded_at_tau_over_k(
    shape: tuple[int, int, int], quantile: float
) -> None:
    x = cases.clients(*shape, torch.float64)
    tau = cases.threshold_between(x, quantile)
    mean = tsvd.soft_threshold(x, tau).tensors.mean(2)
    alone = tsvd.shrink_matrices(x.mean(2), Soft(tau / shape[2]))
    torch.testing.assert_close(mean, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("by", [Soft(6.0), Hard(6.0), Optimal(0.9)])
def test_the_order_of_clients_counts_but_not_where_it_begins(by: Shrinker) -> None:
    x = cases.clients(10, 6, 7, torch.float64)
    out = tsvd.shrink(x, by).tensors
    for shift in range(1, 7):
        torch.testing.assert_close(tsvd.shrink(x.roll(shift, 2), by).tensors, out.roll(shift, 2))
    swapped = [1, 0, *range(2, 7)]
    moved = tsvd.shrink(x[..., swapped], by).tensors - out[..., swapped]
    assert moved.norm() > 0.05 * out.norm()
    # Three clients or fewer have no other orders than shifts and reversals.
    few = x[..., :3]
    torch.testing.assert_close(
        tsvd.shrink(few.flip(2), by).tensors, tsvd.shrink(few, by).tensors.flip(2)
    )


def test_the_noise_of_slices_and_their_edge() -> None:
    nu, d, h = 0.3, 300, 200
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 5, 8):
        x = nu * torch.randn(d, h, count, generator=generator, dtype=torch.float64)
        noise = tsvd.slice_noise(nu, count)
        slices = torch.fft.rfft(x, dim=2).permute(2, 0, 1)
        # The mean of d h squares is within 5 standard deviations, sqrt(2 / (d h)) each at most.
        spread = 5 * math.sqrt(2 / (d * h))
        for k, part in enumerate(slices):
            assert abs(part.abs().square().mean().item() / noise**2 - 1) < spread
            pseudo = part.square().mean().abs().item() / noise**2
            if k == 0 or 2 * k == count:
                assert not part.imag.any() and abs(pseudo - 1) < spread
            else:
                assert pseudo < spread
        # At most t = 4 / sqrt(max) above the edge, but for chance exp(-8); fluctuations below it
        # are of the order of d^(-2/3).
        largest = tsvd.singular_values(x)[:, 0] / (noise * (math.sqrt(d) + math.sqrt(h)))
        assert (largest < 1 + 4 / (math.sqrt(d) + math.sqrt(h))).all()
        assert (largest > 0.95).all()


def planted(d: int, h: int, count: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return rank 3 in every slice, from the edge of the noise up, and the same with noise."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(d, h, count, generator=generator, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(torch.fft.rfft(normal, dim=2).permute(2, 0, 1), full_matrices=False)
    edge = tsvd.slice_noise(noise, count) * (math.sqrt(d) + math.sqrt(h))
    s = edge * torch.tensor([0.8, 1.2, 2.0], dtype=torch.float64)
    slices = (u[..., :3] * s) @ vh[:, :3]
    signal = torch.fft.irfft(slices.permute(1, 2, 0), n=count, dim=2)
    added = torch.randn(d, h, count, generator=generator, dtype=torch.float64)
    return signal, signal + noise * added


@pytest.mark.parametrize(("d", "h", "count"), [(80, 60, 1), (100, 30, 4), (40, 60, 5)])
def test_the_optimal_shrinker_beats_soft_and_hard(d: int, h: int, count: int) -> None:
    noise = 0.2
    level = tsvd.slice_noise(noise, count)
    edge = level * (math.sqrt(d) + math.sqrt(h))

    def loss(by: Shrinker) -> float:
        return sum((tsvd.shrink(y, by).tensors - x).square().sum().item() for x, y in draws)

    draws = [planted(d, h, count, noise, seed) for seed in range(4)]
    optimal = loss(Optimal(level))
    # Any tuning of the others: thresholds that nobody knows without the signal.
    for part in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4):
        assert optimal < loss(Soft(part * edge))
        assert optimal < loss(Hard(part * edge))
    assert optimal < sum((y - x).square().sum().item() for x, y in draws)


def test_noise_alone_becomes_zero() -> None:
    level = tsvd.slice_noise(1.0, 6)
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(60, 40, 6, generator=generator) for _ in range(50)]
    at_edge = torch.stack(tsvd.shrink(tensors, Optimal(level)).kept) > 0
    # Tracy-Widom: 17% of real slices pass the edge, 3% of the 100 complex ones.
    assert at_edge[:, [0, 3]].float().mean() < 0.25 and at_edge[:, 1:3].float().mean() < 0.1
    # 300 slices at exp(-t^2 / 2) = 3.4e-4 each at most; in truth far fewer.
    out = tsvd.shrink(tensors, Optimal(level, margin=4.0))
    assert not any(kept.any() for kept in out.kept) and not any(x.any() for x in out.tensors)


def test_numbers_that_change_nothing_and_empty_tensors(backend: str) -> None:
    x = cases.clients(6, 4, 3)
    for by in (Soft(0.0), Hard(0.0), Optimal(0.0, margin=1.0)):
        out, kept = tsvd.shrink([x, x[:0]], by)
        assert torch.equal(out[0], x) and out[0].data_ptr() != x.data_ptr()
        assert kept[0].tolist() == [4, 4] and kept[1].tolist() == [0, 0]


def test_shrinkers_are_values() -> None:
    assert Soft(torch.tensor([1.0, 2.0])) == Soft((1.0, 2.0)) and Hard(1) != Soft(1)
    assert len({Optimal(1.0), Optimal(torch.tensor(1.0)), Optimal(1.0, margin=1.0)}) == 2


def test_refusals(cpp: str) -> None:
    x = cases.clients(4, 3, 4)
    for maker in (Soft, Hard):
        with pytest.raises(ValueError, match=f"{maker.__name__}: tau must be a finite number >= 0"):
            maker(-1.0)
    with pytest.raises(ValueError, match="Optimal: margin must be a finite number >= 0"):
        Optimal(1.0, margin=math.nan)
    with pytest.raises(ValueError, match=r"Soft: tau must be a number or \[K // 2 \+ 1\], got"):
        Soft(torch.ones(2, 2))
    with pytest.raises(ValueError, match="Soft: tau has 2 numbers for 3 frequencies; pass one"):
        tsvd.soft_threshold(x, torch.ones(2))
    with pytest.raises(ValueError, match="shrink: shrinkers has 1 for 2 tensors"):
        tsvd.shrink([x, x], [Soft(1.0)])
    with pytest.raises(
        ValueError, match=r"shrink_matrices: matrices must be \[d, h\], got \[4, 3, 4"
    ):
        tsvd.shrink_matrices(x, Soft(1.0))
    with pytest.raises(ValueError, match=r"shrink: tensors\[1\] has values that are not finite"):
        tsvd.shrink([x, x / 0.0], Hard(1.0))
    with pytest.raises(ValueError, match="slice_noise: clients must be >= 1, got 0"):
        tsvd.slice_noise(1.0, 0)
    operator = torch.ops.dpkernels.tsvd_shrink
    for bad in ([1.0] * 11, [1.0] * 13):
        with pytest.raises(ValueError, match="curves must have 4 numbers for each slice"):
            operator([x], bad)
    for curve in ([1.0, 2.0, 0, 0], [1.0, 0, 2.0, 0], [2.0, 0, 0.5, 1.0], [math.nan, 0, 0, 0]):
        with pytest.raises(ValueError, match="curves must have cut >= subtracted"):
            operator([x], curve * 3)


def test_opcheck() -> None:
    tensors = [cases.clients(7, 3, 4), cases.clients(3, 5, 5)]
    torch.library.opcheck(torch.ops.dpkernels.tsvd_shrink.default, (tensors, [2.0, 0, 1, 0.5] * 6))
