"""The Triton noise kernel at the edges of its programs, and its Philox against known answers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dpkernels.ops.noise import reference, triton_impl
from python_tests.tolerance import assert_as_accurate

ELEMENTS_PER_PROGRAM = triton_impl._TILES * reference.ELEMENTS_PER_TILE


@triton.jit
def philox_kernel(out, counter, key):
    zero = tl.zeros((1,), tl.uint32)
    words = triton_impl._philox(
        zero + tl.load(counter + 0).to(tl.uint32),
        zero + tl.load(counter + 1).to(tl.uint32),
        zero + tl.load(counter + 2).to(tl.uint32),
        zero + tl.load(counter + 3).to(tl.uint32),
        tl.load(key + 0).to(tl.uint32),
        tl.load(key + 1).to(tl.uint32),
    )
    at = out + tl.arange(0, 1)
    for i in tl.static_range(4):
        tl.store(at + i, words[i].to(tl.int64))


# The known answers that Random123 publishes for philox4x32-10 (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_device_function_gives_the_known_answers(counter, key, words) -> None:
    out = torch.zeros(4, dtype=torch.int64)
    philox_kernel[(1,)](out, torch.tensor(counter), torch.tensor(key))
    assert out.tolist() == words


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, ELEMENTS_PER_PROGRAM, ELEMENTS_PER_PROGRAM + 1])
def test_elements_at_the_edges_of_a_program(n: int, dtype: torch.dtype) -> None:
    # The counter's upper word differs between the two tensors.
    key, counter = -(2**62) - 12345, 2**32 - 1
    start = torch.linspace(-1, 1, n, dtype=dtype)
    ours = [start.clone(), start.clone()]
    plain = [start.float(), start.float()]
    exact = [start.to(torch.float64, copy=True), start.to(torch.float64, copy=True)]
    triton_impl.add_gaussian_noise_(ours, 1.3, key, counter, 0.1)
    reference.add_gaussian_noise_(plain, 1.3, key, counter, 0.1)
    reference.add_gaussian_noise_(exact, 1.3, key, counter, 0.1)
    for a, p, e in zip(ours, plain, exact, strict=True):
        assert_as_accurate(a.float(), p, e)
    assert not torch.equal(ours[0], ours[1])


def test_what_lies_beyond_a_view_is_left_alone() -> None:
    buffer = torch.zeros(3 * ELEMENTS_PER_PROGRAM)
    view = buffer[5 : 5 + ELEMENTS_PER_PROGRAM + 3]
    assert triton_impl._vector(view, view.numel()) == 1
    triton_impl.add_gaussian_noise_([view], 1.0, 1, 2, 1.0)
    assert (view != 0).all()
    assert (buffer[:5] == 0).all() and (buffer[5 + view.numel() :] == 0).all()


@triton.jit
def radius_kernel(words, normals, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    z0, _ = triton_impl._box_muller(tl.load(words + i).to(tl.uint32), tl.zeros((N,), tl.uint32))
    tl.store(normals + i, z0)


def test_the_uniform_is_rounded_once() -> None:
    # Ties of uint32 -> float32, which a second rounding would send the other way; with the word 0
    # for the angle, the normal is sqrt(-2 log u).
    words = torch.tensor(
        [2**32 - 1, 2**32 - 128, 2**32 - 384, 2**24 + 1, 2**24 + 3, 2**25 + 2, 1, 0]
    )
    normals = torch.zeros(8)
    radius_kernel[(1,)](words, normals, N=8)
    exact = (words.double() * 2.0**-32 + 2.0**-33).float()
    assert_as_accurate(normals, (-2 * exact.log()).sqrt(), (-2 * exact.double().log()).sqrt())
