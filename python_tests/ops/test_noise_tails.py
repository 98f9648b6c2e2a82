"""The stream where 32 bits of a word are too few: its tail, and normals near 0.

A word is continued once in 2^19, so that fixed streams with such words are searched for: one block
of Philox tells. Words that no search finds are given to the arithmetic of each backend directly.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats
from torch import Tensor

from dpkernels import backend as backends
from dpkernels.ops.noise import UNREACHABLE_MASS, add_gaussian_noise_, reference, triton_impl
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("add_gaussian_noise_",)

KEY = 0x0123_4567_89AB_CDEF
# Counters of KEY under which a radial word of the first tile is 0 or 1, once in 2^31: the largest
# normals that 32 bits give, 6.77 and 6.60. Found by going through 2^33 blocks.
LARGEST = (34_940_609, 75_668_542, 139_410_954, 33_137_078)
# Counters of KEY, and elements of which 32 bits make exactly 0: of angles, and of radii.
ZEROS = [(517, [2772]), (1639, [10_220, 10_236])]
TWO_32 = 2**32


def words_of(counters: Tensor, blocks: int = 16) -> Tensor:
    """Words ``[counters, blocks, 4]`` of the first blocks of many counters below 2^32."""
    c2, block = torch.meshgrid(counters, torch.arange(blocks), indexing="ij")
    zero = torch.zeros_like(block)
    return reference.philox(torch.stack((block, zero, c2, zero), -1), KEY)


def _places(w0: Tensor, w1: Tensor) -> dict[str, Tensor]:
    """Where words are continued, by the reason, from the definition alone."""
    near = 2**12
    from_axis = torch.minimum(w1 % 2**30, 2**30 - 1 - w1 % 2**30)
    return {
        "u near 0": w0 < near,
        "u near 1": w0 >= TWO_32 - near,
        "angle near an axis": from_axis < near // 4,
    }


@pytest.fixture(scope="module")
def continued() -> dict[str, list[int]]:
    """Return counters of KEY whose first tile has a continued pair, by the reason."""
    found: dict[str, list[int]] = {}
    for start in range(0, 2**18, 2**15):
        counters = torch.arange(start, start + 2**15)
        words = words_of(counters).view(-1, 16, 2, 2)
        for name, where in _places(words[..., 0], words[..., 1]).items():
            found.setdefault(name, []).extend(counters[where.flatten(1).any(1)].tolist())
    # 2^23 pairs, each with probability 2^-20, 2^-20 and 2^-19.
    assert {name: len(counters) > 2 for name, counters in found.items()} == {
        "u near 0": True,
        "u near 1": True,
        "angle near an axis": True,
    }
    return found


def noise(n: int, counter: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the first normals of a stream from the backend that is set."""
    x = torch.zeros(n, dtype=dtype)
    add_gaussian_noise_(x, 1.0, KEY, counter)
    return x


def check_tile(actual: Tensor, counter: int) -> None:
    """Assert that the first tile is right to a few roundings of each pair's radius.

    A small radius is as accurate as a large one, for its size.
    """
    exact = reference.standard_normals(64, KEY, counter, dtype=torch.float64).view(2, 2, 16)
    error = (actual.double().view(2, 2, 16) - exact).abs().amax(1)
    radius = exact.square().sum(1).sqrt()
    assert (error / radius).max() < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", ["u near 0", "u near 1", "angle near an axis"])
def test_continued_words_give_the_same_normals_on_every_backend(
    backend: str, continued: dict[str, list[int]], place: str, dtype: torch.dtype
) -> None:
    for counter in continued[place][:3]:
        check_tile(noise(64, counter, dtype), counter)


def by_32_bits(words: Tensor) -> Tensor:
    """Normals ``[.., 64]`` of words ``[.., 16, 4]``, none of them continued: float64."""
    u = (words[..., ::2].double() * 2.0**-32 + 2.0**-33).float().double()
    signed = torch.where(words[..., 1::2] >= 2**31, words[..., 1::2] - TWO_32, words[..., 1::2])
    angle = math.pi * (signed.double() * 2.0**-31).float().double()
    radius = (-2 * u.log()).sqrt()
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), -1)
    return pairs.flatten(-2).transpose(-1, -2).flatten(-2)


def test_all_other_normals_are_what_32_bits_give(
    backend: str, continued: dict[str, list[int]]
) -> None:
    for counter in [c for counters in continued.values() for c in counters[:2]]:
        words = words_of(torch.tensor([counter]))[0]
        other = ~torch.stack(
            [
                torch.stack(list(_places(*pair).values())).any(0)
                for pair in (words[:, :2].T, words[:, 2:].T)
            ]
        )
        kept = other.repeat_interleave(2, 0).flatten()
        assert 60 <= kept.sum() < 64
        plain = by_32_bits(words)[kept]
        assert_as_accurate(noise(64, counter)[kept], plain.float(), plain)


@pytest.mark.parametrize("counter", LARGEST)
def test_the_largest_words_give_normals_spread_over_the_tail(backend: str, counter: int) -> None:
    # 32 bits would give sqrt(-2 log 2^-33) = 6.7637 or sqrt(-2 log(3 * 2^-33)) = 6.5993, exactly.
    z = reference.standard_normals(64, KEY, counter, dtype=torch.float64)
    radius = z.view(2, 2, 16).square().sum(1).sqrt().max().item()
    assert min(abs(radius - 6.7637), abs(radius - 6.5993)) > 1e-3
    check_tile(noise(64, counter), counter)


# Words (w0, w1) and what continues them: the ends of every place, and points inside.
ENDS = [
    (w0, w1, v0, v1, v2)
    for w0 in (0, 1, 4095, TWO_32 - 1, TWO_32 - 4096, 2**31)
    for w1 in (0, 5, 1023, TWO_32 - 1, 2**30, 2**31 - 1, 2**31, 2**30 * 3 + 7, 12345678)
    for v0, v1, v2 in ((0, 0, 0), (0, 1, TWO_32 - 1), (7, 2**31, 3), (TWO_32 - 1,) * 3)
    if w0 != 2**31 or w1 != 12345678  # one of them at least is continued
]


def exact_pair(w0: int, w1: int, v0: int, v1: int, v2: int) -> tuple[float, float]:
    """Two normals from the definition, on integers of any size."""
    places = {name: bool(x) for name, x in _places(torch.tensor(w0), torch.tensor(w1)).items()}
    low = 2 * (v0 * TWO_32 + v1) + 1
    if places["u near 0"]:
        square = -2 * math.log(np.float32(math.ldexp(2 * (w0 << 64) + low, -97)))
    elif places["u near 1"]:
        beyond = 2 * ((TWO_32 - 1 - w0) << 64) + low
        square = -2 * math.log1p(-float(np.float32(math.ldexp(beyond, -97))))
    else:
        square = -2 * math.log(np.float32(w0 * 2.0**-32 + 2.0**-33))
    quarter, offset = divmod(w1 + 2**29, 2**30)
    quarter, offset = quarter % 4, offset - 2**29
    if places["angle near an axis"]:
        o = math.pi * float(np.float32(math.ldexp(2 * (offset * TWO_32 + v2) + 1, -64)))
        turned = ((math.cos(o), math.sin(o)), (-math.sin(o), math.cos(o)))
        cosine, sine = turned[quarter & 1]
        sign = -1 if quarter & 2 else 1
        cosine, sine = sign * cosine, sign * sine
    else:
        turn = (w1 - TWO_32 if w1 >= 2**31 else w1) * 2.0**-31
        angle = math.pi * float(np.float32(turn))
        cosine, sine = math.cos(angle), math.sin(angle)
    return math.sqrt(square) * cosine, math.sqrt(square) * sine


EXACT = torch.tensor([exact_pair(*words) for words in ENDS], dtype=torch.float64)


@triton.jit
def continued_kernel(words, normals, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    w0 = tl.load(words + i).to(tl.uint32)
    w1 = tl.load(words + N + i).to(tl.uint32)
    v0 = tl.load(words + 2 * N + i).to(tl.uint32)
    v1 = tl.load(words + 3 * N + i).to(tl.uint32)
    v2 = tl.load(words + 4 * N + i).to(tl.uint32)
    z0, z1 = triton_impl._continued(w0, w1, v0, v1, v2)
    tl.store(normals + i, z0)
    tl.store(normals + N + i, z1)


def pairs_of(kind: str, words: list[tuple[int, ...]]) -> Tensor:
    """Normals ``[n, 2]`` of words (w0, w1, v0, v1, v2) that are continued."""
    columns = torch.tensor(words).T.contiguous()
    if kind == "reference":
        return torch.stack(
            reference._continued(columns[0], columns[1], columns[2:].T, torch.float32), -1
        )
    if kind == "triton":
        n = 1 << (len(words) - 1).bit_length()
        padded = torch.nn.functional.pad(columns, (0, n - len(words)))
        normals = torch.zeros(2, n)
        continued_kernel[(1,)](padded.contiguous(), normals, N=n)
        return normals[:, : len(words)].T
    if backends.extension is None:
        pytest.skip("dpkernels._C is not built")
    return torch.tensor([backends.extension.continued_box_muller(*each) for each in words])


KINDS = ["reference", "cpp", "triton"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_every_place_are_the_definition_s(kind: str) -> None:
    error = pairs_of(kind, ENDS).double() / EXACT - 1
    assert error.abs().max() < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", KINDS)
def test_support_reaches_beyond_eleven_sigma(kind: str) -> None:
    largest = pairs_of(kind, [(0, 0, 0, 0, 0)])[0, 0].item()
    assert largest == pytest.approx(math.sqrt(2 * 97 * math.log(2)), rel=1e-6)
    assert largest > 11.59
    # Each further bit of the word that is 0 goes further out.
    reach = pairs_of(kind, [(0, 0, 2**k, 0, 0) for k in range(31, -1, -1)])[:, 0]
    assert (reach.diff() > 0).all() and reach[0] > 6.7 and reach[-1] > 9.4


@pytest.mark.parametrize("kind", KINDS)
def test_no_normal_is_exactly_zero(kind: str) -> None:
    """One in 12 million was, with 32 bits: an element released without noise."""
    words = [
        (w0, w1, v, v, v)
        for w0 in (TWO_32 - 1, TWO_32 - 100, 12345)
        for w1 in (0, TWO_32 - 1, 2**30, 2**30 - 1, 2**31, 2**31 - 1, 3 * 2**30)
        for v in (0, TWO_32 - 1)
    ]
    assert (pairs_of(kind, words) != 0).all()
    # The least of words that are not continued, which no stream of a test has.
    w1 = torch.tensor([2**30 + 1024, 2**30 - 1025, 1024, TWO_32 - 1025, 2**31 + 1024, 2**31 - 1025])
    w0 = torch.full_like(w1, TWO_32 - 4097)
    assert not reference.is_continued(w0, w1).any()
    assert (torch.stack(reference._box_muller(w0, w1, torch.float32)).abs() > 1e-10).all()


@pytest.mark.parametrize(("counter", "elements"), ZEROS)
def test_elements_that_were_released_without_noise_get_some(
    backend: str, counter: int, elements: list[int]
) -> None:
    n = elements[-1] + 1
    blocks = torch.tensor(elements) // 64 * 16 + torch.tensor(elements) % 16
    pair = elements[0] // 32 % 2
    words = reference._words(blocks, 0, KEY, counter)[:, 2 * pair : 2 * pair + 2]
    cosine_and_sine = torch.stack(reference._box_muller(*words.T, torch.float32))
    assert (cosine_and_sine.abs() < 1e-6).any(0).all()  # of 32 bits; the kernels rounded it to 0
    drawn = noise(n, counter)[elements]
    exact = reference.standard_normals(n, KEY, counter, dtype=torch.float64)[elements]
    assert (drawn != 0).all()
    assert (drawn / exact - 1).abs().max() < 8 * torch.finfo(torch.float32).eps


def test_continued_words_are_uniform() -> None:
    """Given the place, exp(-radius^2 / 2) is uniform in it, and so is the angle."""
    # The words v of many blocks of the spaces that continue others.
    more = reference._words(torch.arange(2**16), reference.TAIL_BLOCKS, KEY, 3)
    w0 = torch.arange(2**16) % 4096
    z = torch.stack(reference._continued(w0, torch.full_like(w0, 12345678), more, torch.float64))
    u = (-z.square().sum(0) / 2).exp() * 2**20
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6
    # Within a word, too: what 32 bits leave open.
    assert stats.kstest((u * 4096 % 1).numpy(), "uniform").pvalue > 1e-6
    near_one = torch.stack(
        reference._continued(TWO_32 - 1 - w0, torch.full_like(w0, 12345678), more, torch.float64)
    )
    u = -torch.expm1(-near_one.square().sum(0) / 2) * 2**20
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6
    offsets = w0 // 2 - 1024
    for quarter in range(4):
        w1 = (offsets + quarter * 2**30) % TWO_32
        z = torch.stack(reference._continued(torch.full_like(w1, 2**31), w1, more, torch.float64))
        angle = torch.atan2(z[1], z[0]) - quarter * math.pi / 2
        turn = torch.remainder(angle + math.pi, 2 * math.pi) / math.pi - 1
        assert stats.kstest((turn * 2**20 + 0.5).numpy(), "uniform").pvalue > 1e-6


def test_the_mass_beyond_the_support_is_what_accountants_are_told() -> None:
    """The last cell of u ends at 2^-96: all beyond it, and the cell itself, is not drawn as is."""
    cell = math.ldexp(1, -96)
    assert cell == UNREACHABLE_MASS
    assert 2 * stats.norm.sf(math.sqrt(2 * 97 * math.log(2))) < UNREACHABLE_MASS


def test_no_block_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, ...]] = []
    philox = reference.philox

    def watched(counters: Tensor, key: int) -> Tensor:
        used.extend(tuple(row) for row in counters.view(-1, 4).tolist())
        return philox(counters, key)

    monkeypatch.setattr(reference, "philox", watched)
    monkeypatch.setattr(reference, "is_continued", lambda w0, w1: w0 >= 0)
    for counter in (0, 1, 2**32 - 1, 2**63 - 1):
        reference.standard_normals(200, KEY, counter)
    assert len(used) == 4 * 64 * 3
    assert len(set(used)) == len(used)
    # Children of keys come from counters of 2^63 and more, and these have less.
    assert max(c3 for _, _, _, c3 in used) < 2**31
    # A tensor of 2^63 - 1 elements has blocks below 2^61: the two highest bits are free.
    assert {c1 >> 29 for _, c1, _, _ in used} == {0, 4, 6}
