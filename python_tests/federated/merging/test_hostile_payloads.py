"""Bytes from anywhere give a ValueError or a valid Fisher: no crash, no large allocation."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkernels.federated.merging.budget import parts
from dpkernels.federated.merging.compress import compress, decompress
from dpkernels.federated.merging.layout import LayerLayout, Layout
from dpkernels.federated.merging.low_rank import trapezoid_entries
from dpkernels.federated.merging.packing import Reader, text
from python_tests.federated.merging.uploads import assert_valid, made, mixed
from python_tests.hypothesis_profiles import examples

SMALL = {"fc.weight": (5, 7)}
LAYOUT = Layout.of(*mixed())
FORMS = ["symmetric", "paper"]
PAYLOADS = {
    (form, shared): compress(
        *mixed(), budget=20_000, form=form, layout=LAYOUT if shared else None
    ).payload
    for form in FORMS
    for shared in (True, False)
}
CASES = st.sampled_from(sorted(PAYLOADS))
SYMMETRIC = PAYLOADS["symmetric", False]
# Where the header has what.
VERSION, FLAGS, BITS, RANK, NAMES = 2, 3, 4, 8, 20


def read(payload: bytes, shared: bool, semidefinite: bool = True) -> bool:
    """Return whether a payload is taken; what is taken must be valid."""
    try:
        state, fisher = decompress(payload, layout=LAYOUT if shared else None)
    except ValueError:
        return False
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    assert_valid(fisher, semidefinite)
    return True


def changed(payload: bytes, at: int, new: bytes) -> bytes:
    """Return a payload with some bytes replaced."""
    return payload[:at] + new + payload[at + len(new) :]


@examples(200)
@given(CASES, st.floats(0, 1, exclude_max=True))
def test_a_payload_that_was_cut_off_is_refused(case, share):
    payload = PAYLOADS[case]
    assert not read(payload[: int(share * len(payload))], case[1])


@given(CASES, st.binary(min_size=1, max_size=9))
def test_a_payload_that_goes_on_is_refused(case, tail):
    assert not read(PAYLOADS[case] + tail, case[1])


@examples(400)
@given(CASES, st.data())
def test_changed_bytes_are_refused_or_valid(case, data):
    payload = bytearray(PAYLOADS[case])
    # Every second one near the front, where header and names are.
    ends = st.sampled_from([200, len(payload)])
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, data.draw(ends) - 1))
        payload[place] = data.draw(st.integers(0, 255))
    read(bytes(payload), case[1], semidefinite=payload[FLAGS] & 1 == 0)


@examples(100)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(data, shared):
    assert not read(data, shared)
    assert not read(SYMMETRIC[:NAMES] + data, False)


def test_every_byte_of_the_front_may_be_any():
    payload = compress(*made(SMALL), budget=2000).payload
    front = len(payload) - 200
    for place in range(front):
        for value in (0, 1, 127, 128, 255):
            try:
                _, fisher = decompress(changed(payload, place, bytes([value])))
            except ValueError:
                continue
            assert_valid(fisher, semidefinite=payload[FLAGS] & 1 == 0 and place != FLAGS)


@pytest.mark.parametrize(
    ("at", "new", "words"),
    [
        (0, b"XX", "must start with"),
        (VERSION, b"\x02", "version 2"),
        (FLAGS, b"\x04", "flags 4"),
        (FLAGS, b"\x02", "has no layout"),
        (BITS, b"\x01", "bits must be 2 to 32"),
        (BITS + 3, b"\x21", "bits must be 2 to 32"),
        (RANK, b"\x00\x00\x00\x00", "rank must be at least 1"),
        (BITS, b"\x0b", "bytes by its header"),
        (NAMES, b"\xff\xff", "payload|layout|decompress"),
    ],
)
def test_headers_that_are_never_written_are_refused(at, new, words):
    with pytest.raises(ValueError, match=words):
        decompress(changed(SYMMETRIC, at, new))


@pytest.mark.parametrize(
    ("value", "words"),
    [(float("nan"), "finite"), (float("inf"), "finite"), (-1.0, ">= 0"), (3e38, "float32|taken")],
)
def test_scales_that_are_never_written_are_refused(value, words):
    state, fisher = made(SMALL)
    layout = Layout.of(state, fisher)
    payload = compress(state, fisher, budget=2000, layout=layout).payload
    # Header, hash, 1 scale and 35 codes of the weight: then A's first scale.
    settings = compress(state, fisher, budget=2000, layout=layout).settings
    at = 28 + 4 + (35 * settings.weights + 7) // 8

    attacked = changed(payload, at, struct.pack("<f", value))

    with pytest.raises(ValueError, match=words):
        decompress(attacked, layout=layout)


def huge(shapes: dict[str, tuple[int, ...]], layer: LayerLayout | None) -> bytes:
    """Return a header and a layout of these shapes, with nothing behind."""
    layout = Layout(shapes, () if layer is None else (layer,))
    return SYMMETRIC[:NAMES] + layout.encode()


@pytest.mark.parametrize(
    "payload",
    [
        huge({"w": (2**32 - 1,) * 8}, None),
        huge({"w": (2**31, 2**31)}, LayerLayout("fc", "kronecker", "w")),
        huge({"w": (2**20, 2**20)}, LayerLayout("w", "diagonal", "w")),
    ],
)
def test_shapes_without_bytes_allocate_nothing(payload):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="bytes by its header"):
            decompress(payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_small_payload_does_not_decode_to_a_large_factor():
    # A weight of 1 x 100,000 is 150 kB; its A would be 40 GB.
    shapes = {"w": (1, 100_000)}
    layer = LayerLayout("fc", "kronecker", "w")
    front = struct.pack("<2sBBBBBBIQ", b"FF", 1, 0, 2, 2, 2, 2, 1, 1)
    front += Layout(shapes, (layer,)).encode()
    with pytest.raises(ValueError, match=r"must be (\d+) bytes") as refused:
        decompress(front)
    size = int(str(refused.value).split("must be ")[1].split()[0])
    assert size < 10**6

    with pytest.raises(ValueError, match="bytes of memory, over"):
        decompress(front + bytes(size - len(front)))


def test_the_limit_is_the_callers():
    payload = compress(*made(SMALL), budget=2000).payload
    with pytest.raises(ValueError, match="over 1,000"):
        decompress(payload, limit=1000)


def test_a_layout_that_was_given_is_compared():
    other = Layout.of(*made(SMALL))
    for shared in (True, False):
        payload = PAYLOADS["symmetric", shared]
        assert decompress(payload, layout=LAYOUT)[1].records == 17
        with pytest.raises(ValueError, match="made for another layout"):
            decompress(payload, layout=other)


def layout_bytes(shapes: list[tuple[str, tuple[int, ...]]], layers: list[tuple[int, ...]]) -> bytes:
    """Return a layout as it is sent, unchecked; layers as kind, weight, bias."""
    parts = [struct.pack("<HHH", len(shapes), len(layers), 0)]
    for name, shape in shapes:
        parts += [text(name), struct.pack(f"<B{len(shape)}I", len(shape), *shape)]
    for number, layer in enumerate(layers):
        parts += [text(f"layer {number}"), struct.pack("<BHH", *layer)]
    return b"".join(parts)


NONE = 0xFFFF


@pytest.mark.parametrize(
    ("shapes", "layers", "words"),
    [
        ([("w", (2, 3)), ("w", (2, 3))], [], "there twice"),
        ([("w", (0, 3))], [], "axes of length"),
        ([("w", (1,) * 9)], [], "at most 8 axes"),
        ([("w", (2, 3))], [(2, 0, NONE)], "unknown kind or parameter"),
        ([("w", (2, 3))], [(0, 1, NONE)], "unknown kind or parameter"),
        ([("w", (2, 3))], [(0, NONE, NONE)], "must cover"),
        ([("w", (2, 3))], [(0, 0, NONE), (1, 0, NONE)], "no other layer covers"),
        ([("w", (2, 3))], [(0, 0, 0)], "weight and bias"),
        ([("w", (2, 3)), ("b", (3,))], [(0, 0, 1)], r"bias \[O\]"),
        ([("w", (2,))], [(0, 0, NONE)], r"weight \[O"),
        ([("w", (2, 3)), ("b", (2,))], [(1, 0, 1)], "one parameter"),
        ([("b", (2,))], [(1, NONE, 0)], "one parameter"),
    ],
)
def test_layouts_that_do_not_fit_together_are_refused(shapes, layers, words):
    with pytest.raises(ValueError, match=words):
        Layout.decode(Reader(layout_bytes(shapes, layers)))


def test_layouts_come_back():
    assert Layout.decode(Reader(LAYOUT.encode())) == LAYOUT
    assert LAYOUT.digest() != Layout.of(*made(SMALL)).digest()


def test_factors_of_any_codes_are_semidefinite():
    state, fisher = made(SMALL)
    layout = Layout.of(state, fisher)
    upload = compress(state, fisher, budget=400, layout=layout)
    (weight,), (first, _) = parts(layout, upload.settings)
    # Behind the weight and the scales of A's 7 rows: its codes, whole bytes.
    begin, size = 28 + weight.length + 4 * 7, first.length - 4 * 7 - (8 + 7)
    assert size * 8 == trapezoid_entries(7, 7) * upload.settings.factors
    generator = torch.Generator().manual_seed(0)
    taken = 0
    for _ in range(100):
        noise = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        try:
            _, found = decompress(
                changed(upload.payload, begin, noise.numpy().tobytes()), layout=layout
            )
        except ValueError:
            continue
        taken += 1
        assert_valid(found)
    assert taken > 50
