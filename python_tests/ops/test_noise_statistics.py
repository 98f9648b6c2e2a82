"""The noise is standard normal and independent, on millions of values of fixed streams.

Bounds come from the sampling distribution: a statistic with standard error s may lie 5 s from its
expectation, a test may reject at 1e-6. The streams are fixed, so a pass stays a pass. Each check is
shown to reject noise that is wrong in the way it looks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpkernels.ops.noise import add_gaussian_noise_
from python_tests.conftest import CPP

OPERATIONS = ("add_gaussian_noise_",)

N = 2**22
STREAMS = [(0, 0), (1, 0), (-(2**63) + 17, 2**40 + 3)]
SIGMAS = 5.0
SIGNIFICANCE = 1e-6
# sqrt(-2 log u) at the smallest u, 2^-97.
LARGEST = math.sqrt(-2 * math.log(2.0**-97))


def draw(n: int, key: int, counter: int) -> Tensor:
    """Return ``n`` standard normals from the backend that serves this machine by default."""
    x = torch.zeros(n)
    add_gaussian_noise_(x, 1.0, key, counter)
    return x


@pytest.fixture(scope="module", params=STREAMS)
def normals(request: pytest.FixtureRequest) -> Tensor:
    """Return the values of one stream."""
    return draw(N, *request.param)


def check_moments(z: Tensor) -> None:
    """Mean, variance, skewness and kurtosis, each within 5 standard errors."""
    z = z.double()
    n = z.numel()
    # Var of z^k is E z^2k - (E z^k)^2: 1, 2, 15, 96 for k = 1 to 4.
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (z.pow(power).mean().item() - expected) / math.sqrt(variance / n)
        assert abs(error) < SIGMAS, f"moment {power} is {error:.1f} standard errors off"


def check_distribution(z: Tensor) -> None:
    """Kolmogorov-Smirnov on the whole line, chi-square over 256 bins of equal probability."""
    assert stats.kstest(z.double().numpy(), "norm").pvalue > SIGNIFICANCE, "Kolmogorov-Smirnov"
    uniform = torch.special.ndtr(z.double())
    bins = torch.histc(uniform, 256, 0, 1)
    assert stats.chisquare(bins.numpy()).pvalue > SIGNIFICANCE, "chi-square"


def check_tails(z: Tensor, n: int | None = None) -> None:
    """Counts beyond 3, 4 and 5 sigma on both sides against their binomial distribution.

    n: how many values were drawn, if ``z`` holds the large ones only.
    """
    for sigma in (3.0, 4.0, 5.0):
        for count in ((z > sigma).sum().item(), (z < -sigma).sum().item()):
            law = stats.binom(n or z.numel(), stats.norm.sf(sigma))
            low, high = law.ppf(SIGNIFICANCE), law.isf(SIGNIFICANCE)
            assert low <= count <= high, f"{count} beyond {sigma} sigma, not in {low} to {high}"
    assert z.abs().max().item() <= LARGEST


def check_autocorrelation(z: Tensor) -> None:
    """Correlation of values and of squares with those 1 to 64 further on."""
    z = z[: N // 4].double()
    for values in (z, (z.square() - 1) / math.sqrt(2)):
        for lag in range(1, 65):
            check_uncorrelated(values[:-lag], values[lag:], f"lag {lag}")


def check_uncorrelated(a: Tensor, b: Tensor, what: str) -> None:
    """The mean product of two independent standardised samples, within 5 standard errors."""
    error = (a.double() @ b.double()).item() / math.sqrt(a.numel())
    assert abs(error) < SIGMAS, f"correlation at {what} is {error:.1f} standard errors off"


def check_resolution(z: Tensor) -> None:
    """At least as many different values as a uniform choice from 2^24 would give, halved.

    float32 normals come from 2^32 x 2^32 pairs; half-precision ones take a few thousand values.
    """
    cells = 2.0**24
    expected = cells * -math.expm1(-z.numel() / cells)
    assert z.unique().numel() > expected / 2, "few different values"


def test_moments(normals: Tensor) -> None:
    check_moments(normals)


def test_distribution(normals: Tensor) -> None:
    check_distribution(normals)


def test_tails(normals: Tensor) -> None:
    check_tails(normals)


@pytest.mark.parametrize("cpp", CPP[-1:], indirect=True)
def test_tails_to_five_sigma(cpp: str) -> None:
    # 19 values are expected beyond 5 sigma on each side: none at all would be seen.
    streams = [draw(N, 2, counter) for counter in range(16)]
    large = torch.cat([z[z.abs() > 2.9] for z in streams])
    check_tails(large, 16 * N)
    with pytest.raises(AssertionError, match="0 beyond 5"):
        check_tails(large.clamp(-4.9, 4.9), 16 * N)


def test_autocorrelation(normals: Tensor) -> None:
    check_autocorrelation(normals)


def test_resolution(normals: Tensor) -> None:
    check_resolution(normals)


def test_float64_buffers_get_normal_noise() -> None:
    x = torch.zeros(N // 4, dtype=torch.float64)
    add_gaussian_noise_(x, 1.0, *STREAMS[1])
    check_moments(x)
    check_distribution(x)


def test_the_words_of_a_block_are_independent() -> None:
    by_word = draw(N, 3, 1).view(-1, 4, 16).transpose(0, 1).reshape(4, -1)
    for i in range(4):
        for j in range(i):
            check_uncorrelated(by_word[i], by_word[j], f"words {i} and {j}")
            # Box-Muller pairs share a radius: a wrong angle shows in the squares.
            squares = (by_word[[i, j]].double().square() - 1) / math.sqrt(2)
            check_uncorrelated(squares[0], squares[1], f"squares of words {i} and {j}")


NEIGHBOURS = [(5, 7), (6, 7), (5, 8), (-5, 7), (5 + 2**32, 7), (5, 7 + 2**32), (7, 5), (4, 7)]


def test_streams_of_neighbouring_keys_and_counters_are_independent() -> None:
    streams = {pair: draw(N // 8, *pair).double() for pair in NEIGHBOURS}
    pairs = list(streams)
    for index, first in enumerate(pairs):
        for second in pairs[:index]:
            a, b = streams[first], streams[second]
            check_uncorrelated(a, b, f"{first} and {second}")
            check_uncorrelated(a[:-64], b[64:], f"{first} and {second}, one tile on")


def test_sums_over_streams_have_the_right_variance() -> None:
    # 256 counters of one key, added up: noise of 256 steps, whose variance is 256.
    total = torch.zeros(2**14)
    for counter in range(256):
        add_gaussian_noise_(total, 1.0, 11, counter)
    check_moments(total / 16)


def test_first_values_over_keys_are_normal() -> None:
    # A weak key schedule shows in the first block of many keys.
    first = torch.cat([draw(64, key, 0) for key in range(4096)])
    check_moments(first)
    check_distribution(first)
    check_uncorrelated(first[:-64], first[64:], "neighbouring keys")


def _normal() -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def _uniform() -> Tensor:
    uniform = torch.rand(N, generator=torch.Generator().manual_seed(0))
    return (2 * uniform - 1) * math.sqrt(3)


def _short_uniforms() -> Tensor:
    """Box-Muller from 10-bit uniforms: the radius ends at sqrt(-2 log 2^-11) = 3.9."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randint(0, 2**10, (N,), generator=generator).double() * 2.0**-10 + 2.0**-11
    t = torch.rand(N, generator=generator, dtype=torch.float64)
    return ((-2 * u.log()).sqrt() * (2 * math.pi * t).cos()).float()


WRONG: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = {
    "biased": (lambda: _normal() + 0.01, check_moments),
    "one percent too small": (lambda: _normal() * 0.99, check_moments),
    "uniform of the same variance": (_uniform, check_moments),
    "uniform, distribution": (_uniform, check_distribution),
    "shifted, distribution": (lambda: _normal() + 0.01, check_distribution),
    "half precision": (lambda: _normal().bfloat16().float(), check_resolution),
    "float16": (lambda: _normal().half().float(), check_resolution),
    "clipped at 4 sigma": (lambda: _normal().clamp(-4, 4), check_tails),
    "short uniforms": (_short_uniforms, check_tails),
    "too heavy": (lambda: _normal() * 1.02, check_tails),
    "each value twice": (lambda: _normal()[: N // 2].repeat_interleave(2), check_autocorrelation),
    "moving average": (lambda: _normal() + 0.01 * _normal().roll(17), check_autocorrelation),
    "repeated stream": (
        _normal,
        lambda z: check_uncorrelated(z, z.clone(), "a repeated stream"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_checks_reject_wrong_noise(name: str) -> None:
    make, check = WRONG[name]
    with pytest.raises(AssertionError):
        check(make())


def test_the_checks_accept_the_framework_s_noise() -> None:
    for check in (check_moments, check_distribution, check_tails, check_autocorrelation):
        check(_normal())
