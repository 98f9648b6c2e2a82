"""Packing takes b bits for a code, comes back, and reads nothing that it did not write."""

from __future__ import annotations

import pytest
import torch

from dpkernels.federated.merging.packing import Reader, pack, packed_bytes, text, unpack

ALL_BITS = range(1, 33)


def random_codes(count: int, bits: int) -> torch.Tensor:
    """Return codes over the whole range, its ends among them."""
    codes = torch.randint(0, 1 << bits, (count,), generator=torch.Generator().manual_seed(bits))
    codes[: min(count, 2)] = torch.tensor([(1 << bits) - 1, 0])[: min(count, 2)]
    return codes


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1001])
def test_codes_come_back(bits, count):
    codes = random_codes(count, bits)

    packed = pack(codes, bits)

    assert len(packed) == packed_bytes(count, bits) == -(-count * bits // 8)
    assert torch.equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", [1, 9, 13, 32])
def test_codes_come_back_over_several_chunks(bits):
    codes = random_codes(3 * 65536 + 5, bits)

    assert torch.equal(unpack(pack(codes, bits), bits, len(codes)), codes)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_bytes_are_the_codes_written_side_by_side(bits):
    codes = random_codes(37, bits)
    digits = "".join(f"{int(code):0{bits}b}" for code in codes)
    digits += "0" * (-len(digits) % 8)

    assert pack(codes, bits) == int(digits, 2).to_bytes(len(digits) // 8, "big")


@pytest.mark.parametrize("codes", [torch.tensor([8]), torch.tensor([-1])])
def test_codes_that_do_not_fit_are_refused(codes):
    with pytest.raises(ValueError, match="codes of 3 bits must be 0 to 7"):
        pack(codes, 3)


def test_codes_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="int64"):
        pack(torch.zeros(3), 3)


@pytest.mark.parametrize("bits", [-1, 0, 33])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(ValueError, match="1 to 32"):
        packed_bytes(8, bits)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x00" * 3])
def test_another_length_is_refused(data):
    with pytest.raises(ValueError, match="must be 2 bytes"):
        unpack(data, 3, 4)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="unpack"):
        unpack(b"", 3, -1)


def test_a_payload_has_one_spelling():
    with pytest.raises(ValueError, match="last 4 bits must be 0"):
        unpack(b"\x00\x01", 3, 4)


def test_a_reader_stops_at_the_end():
    reader = Reader(b"abc")
    assert reader.take(2) == b"ab" and reader.left == 1
    for size in (2, -1):
        with pytest.raises(ValueError, match="was it cut off"):
            reader.take(size)
    with pytest.raises(ValueError, match="was it cut off"):
        reader.floats(1)


def test_text_comes_back_and_other_bytes_are_refused():
    assert Reader(text("Gewicht ß")).text() == "Gewicht ß"
    with pytest.raises(ValueError, match="UTF-8"):
        Reader(b"\x01\x00\xff").text()
    with pytest.raises(ValueError, match="65,535"):
        text("x" * 65536)
