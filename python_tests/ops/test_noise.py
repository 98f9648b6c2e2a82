"""The noise stream: known answers of Philox, and the same numbers on every backend."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpkernels import backend as backends
from dpkernels.ops.noise import NoiseKey, add_gaussian_noise_, reference
from python_tests.tolerance import assert_as_accurate

OPERATIONS = ("add_gaussian_noise_",)

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

KEY, COUNTER = 0x0123_4567_89AB_CDEF, 5
SIZES = [0, 1, 2, 15, 16, 63, 64, 65, 127, 1025, 4097]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_reference_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    words = reference.philox(torch.tensor(counter), key[0] | key[1] << 32)
    assert tuple(words.tolist()) == answer


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_compiled_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    if backends.extension is None:
        pytest.skip("dpkernels._C is not built")
    assert tuple(backends.extension.philox4x32_10(*counter, *key)) == answer


def philox(counter: list[int], key: int) -> list[int]:
    """Philox 4x32-10 on Python's integers, written from the paper."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def stream_element(index: int, key: int, counter: int) -> float:
    """Return element ``index`` of the stream, from its definition and one at a time."""
    tile, within = divmod(index, 64)
    word, lane = divmod(within, 16)
    block = 16 * tile + lane
    words = philox([block % 2**32, block >> 32, counter % 2**32, counter >> 32], key % 2**64)
    radial, angular = words[word & 2], words[word | 1]
    uniform = torch.tensor(radial * 2.0**-32 + 2.0**-33, dtype=torch.float64).float().item()
    turn = (angular - 2**32 if angular >= 2**31 else angular) * 2.0**-31
    angle = math.pi * torch.tensor(turn, dtype=torch.float64).float().item()
    return math.sqrt(-2 * math.log(uniform)) * (math.sin if word & 1 else math.cos)(angle)


@pytest.mark.parametrize("counter", [0, 1, 2**32 - 1, 2**32, 2**62 + 12345, 2**63 - 1])
@pytest.mark.parametrize("key", [0, 1, -1, KEY, -(2**63), 2**63 - 1])
def test_the_reference_is_the_stream_that_is_documented(key: int, counter: int) -> None:
    exact = reference.standard_normals(200, key, counter, dtype=torch.float64)
    scalar = torch.tensor([stream_element(i, key, counter) for i in range(200)]).double()
    assert_as_accurate(exact.float(), scalar.float(), exact)


def noise(
    n: int, key: int = KEY, counter: int = COUNTER, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the first ``n`` standard normals of a stream, from the backend that is set."""
    x = torch.zeros(n, dtype=dtype)
    add_gaussian_noise_(x, 1.0, key, counter)
    return x


def check_noisy(
    actual: Tensor, x: Tensor, std: float, key: int, counter: int, scale: float
) -> None:
    """Assert that ``actual`` is ``scale * (x + std * z)`` with normals of float32 accuracy.

    What follows in the stream is compared too, plain PyTorch with itself: a few elements alone
    might be exact by luck and ask for as much.
    """
    n = x.numel()
    x = torch.cat((x.flatten(), x.new_zeros(4096)))
    exact = reference.standard_normals(len(x), key, counter, dtype=torch.float64)
    normals = reference.standard_normals(len(x), key, counter).to(x.dtype)
    plain = scale * (x + std * normals)
    assert_as_accurate(
        torch.cat((actual.flatten(), plain[n:])), plain, scale * (x.double() + std * exact)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", SIZES)
def test_the_stream_is_the_same_on_every_backend(backend: str, n: int, dtype: torch.dtype) -> None:
    check_noisy(noise(n, dtype=dtype), torch.zeros(n, dtype=dtype), 1.0, KEY, COUNTER, 1.0)


@pytest.mark.parametrize("counter", [0, 2**31, 2**32 - 1, 2**32, 2**62 + 12345])
@pytest.mark.parametrize("key", [0, -1, -(2**63), 2**63 - 1, 0xDEAD_BEEF_0000_0001])
def test_all_bits_of_key_and_counter_count(backend: str, key: int, counter: int) -> None:
    check_noisy(noise(130, key, counter), torch.zeros(130), 1.0, key, counter, 1.0)


def test_the_last_counters_of_a_key_can_be_used(backend: str) -> None:
    check_noisy(noise(9, KEY, 2**63 - 1), torch.zeros(9), 1.0, KEY, 2**63 - 1, 1.0)
    pair = [torch.zeros(9), torch.zeros(9)]
    add_gaussian_noise_(pair, 1.0, KEY, 2**63 - 2)
    assert torch.equal(pair[1], noise(9, KEY, 2**63 - 1))


@pytest.mark.parametrize("key", [-1, -(2**63), -12345])
def test_signed_and_unsigned_keys_are_the_same(backend: str, key: int) -> None:
    assert torch.equal(noise(100, key), noise(100, key + 2**64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.125, -3.7, 0.0])
@pytest.mark.parametrize("std", [0.0, 0.3, 17.0])
def test_noise_is_added_then_scaled(
    backend: str, std: float, scale: float, dtype: torch.dtype
) -> None:
    x = torch.linspace(-5, 5, 333, dtype=dtype)
    actual = x.clone()
    add_gaussian_noise_(actual, std, KEY, COUNTER, scale=scale)
    check_noisy(actual, x, std, KEY, COUNTER, scale)
    if std == 0:
        assert torch.equal(actual, x * scale)


def test_a_longer_draw_starts_with_the_shorter_one(backend: str) -> None:
    whole = noise(700)
    for n in (1, 63, 64, 65, 129, 500, 699):
        assert torch.equal(noise(n), whole[:n])


def test_a_list_is_its_tensors_one_by_one(backend: str) -> None:
    shapes = [(3, 5), (0,), (), (257,), (2, 0, 3), (64,)]
    together = [torch.full(shape, 2.0) for shape in shapes]
    add_gaussian_noise_(together, 0.5, KEY, COUNTER, scale=2.0)
    for index, (shape, actual) in enumerate(zip(shapes, together, strict=True)):
        alone = torch.full(shape, 2.0)
        add_gaussian_noise_(alone, 0.5, KEY, COUNTER + index, scale=2.0)
        assert torch.equal(actual, alone)
    add_gaussian_noise_([], 0.5, KEY, COUNTER)


def test_strides_do_not_change_the_noise(backend: str) -> None:
    x = torch.linspace(-1, 1, 15 * 9).view(15, 9)
    contiguous = x.clone()
    add_gaussian_noise_(contiguous, 0.5, KEY, COUNTER, scale=3.0)
    base = torch.full((40, 30), 7.0)
    views = [
        base[:15, 3:12],
        base.t()[2:17, 1:10],
        base[5:35:2, 2:29:3],
        base.flatten()[1:136].view(15, 9),
        base.as_strided((15, 9), (1, 16)),
    ]
    for view in views:
        base.fill_(7.0)
        view.copy_(x)
        add_gaussian_noise_(view, 0.5, KEY, COUNTER, scale=3.0)
        # A strided kernel may round differently (fused multiply-add), the noise is the same.
        check_noisy(view.contiguous(), x, 0.5, KEY, COUNTER, 3.0)
        view.fill_(7.0)
        assert (base == 7.0).all(), "something beside the view was written"


@given(
    n=st.integers(0, 300),
    key=st.integers(-(2**63), 2**64 - 1),
    counter=st.integers(0, 2**63 - 2),
    std=st.floats(0, 100, width=32),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_stream(
    backend: str, n: int, key: int, counter: int, std: float, dtype: torch.dtype
) -> None:
    x = torch.linspace(-1, 1, n, dtype=dtype)
    actual = x.clone()
    add_gaussian_noise_(actual, std, key, counter)
    check_noisy(actual, x, std, key, counter, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_of_threads_gives_the_same_bits(
    cpp: str, threads: int, dtype: torch.dtype
) -> None:
    several = noise(300_007, dtype=dtype)
    xs = [torch.zeros(n, dtype=dtype) for n in (100_003, 5, 65_536)]
    add_gaussian_noise_(xs, 1.0, KEY, COUNTER)
    torch.set_num_threads(1)
    assert torch.equal(several, noise(300_007, dtype=dtype))
    for index, x in enumerate(xs):
        assert torch.equal(x, noise(len(x), KEY, COUNTER + index, dtype))


def test_the_noise_of_half_precision_sums_is_float32() -> None:
    # Half-precision noise takes few values; in float32 hardly any two are the same.
    values = noise(100_000)
    assert values.unique().numel() > 0.95 * values.numel()
    assert values.half().unique().numel() < 0.5 * values.numel()
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match="float32"):
            add_gaussian_noise_(torch.zeros(5, dtype=dtype), 1.0, KEY, COUNTER)


def test_a_key_object_never_gives_two_tensors_the_same_noise(backend: str) -> None:
    key = NoiseKey()
    drawn = []
    for _ in range(3):
        xs = [torch.zeros(65), torch.zeros(65), torch.zeros(65)]
        first = key.counter
        add_gaussian_noise_(xs, 1.0, key)
        assert key.counter == first + 3
        drawn += xs
    assert len({tuple(x.tolist()) for x in drawn}) == 9
    by_number = torch.zeros(65)
    add_gaussian_noise_(by_number, 1.0, key.key, key.counter - 1)
    assert torch.equal(by_number, drawn[-1])
