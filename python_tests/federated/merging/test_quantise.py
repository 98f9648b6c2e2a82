"""Quantisers keep their bounds: half a step, half a ratio, zero where zero was sent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpkernels.federated.merging.packing import Reader
from dpkernels.federated.merging.quantise import (
    Logarithmic,
    Uniform,
    dequantise,
    dequantise_log,
    levels,
    paper_bits,
    quantise,
    quantise_log,
)

EPS = torch.finfo(torch.float64).eps
NUMBERS = st.floats(-1e30, 1e30, allow_nan=False)
POSITIVE = st.floats(1e-40, 1e30, allow_nan=False)


def test_levels_are_the_papers():
    assert [levels(paper_bits(s_q)) for s_q in (1, 2, 3, 4, 6, 16)] == [
        2**31 - 1,
        2**15 - 1,
        2**9 - 1,
        2**7 - 1,
        2**4 - 1,
        1,
    ]
    for s_q in (0, 17):
        with pytest.raises(ValueError, match="1 to 16"):
            paper_bits(s_q)
    with pytest.raises(ValueError, match="2 to 32"):
        levels(1)


@pytest.mark.parametrize("s_q", range(1, 17))
def test_one_row_is_formula_84_bit_for_bit(s_q):
    x = torch.randn(200, generator=torch.Generator().manual_seed(s_q)).double()
    vector = x.float().double().numpy()
    l_q, norm = 2 ** (32 // s_q - 1) - 1, np.abs(vector).max()
    wanted = norm * np.sign(vector) * (np.round(l_q * (np.abs(vector) / norm)) / l_q)

    codes, scales = quantise(torch.from_numpy(vector)[None], paper_bits(s_q))

    found = dequantise(codes, scales, paper_bits(s_q))[0]
    assert float(scales) == norm
    assert np.array_equal(found.numpy(), wanted)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.integers(2, 32))
def test_the_error_is_half_a_step(values, bits):
    x = torch.tensor([values], dtype=torch.float64)

    codes, scales = quantise(x, bits)

    found = dequantise(codes, scales, bits)
    # Division, product and product again round by EPS / 2 of the scale each.
    bound = scales[:, None] * (1 / (2 * levels(bits)) + 2 * EPS)
    assert bool(((found - x).abs() <= bound).all())


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_scales_are_the_least_float32_that_covers_the_row(values):
    x = torch.tensor([values], dtype=torch.float64)
    _, scales = quantise(x, 8)

    largest, single = float(x.abs().max()), scales.float()

    assert float(single) == float(scales) >= largest
    below = float(torch.nextafter(single, torch.tensor(-math.inf)))
    assert below < largest or largest == 0


def test_rows_have_their_own_scales():
    x = torch.stack([torch.linspace(-1, 1, 16), torch.zeros(16), torch.linspace(0, 1e-6, 16)])

    codes, scales = quantise(x, 8)

    found = dequantise(codes, scales, 8)
    assert scales[1] == 0 and not found[1].any()
    assert bool(((found - x).abs().amax(1) <= scales / 127 / 2 * (1 + 8 * EPS)).all())


def test_codes_and_scales_that_were_never_written_are_refused():
    with pytest.raises(ValueError, match="0 to 254"):
        dequantise(torch.tensor([[255]]), torch.ones(1), 8)
    with pytest.raises(ValueError, match=">= 0"):
        dequantise(torch.tensor([[3]]), -torch.ones(1), 8)


@given(st.lists(POSITIVE | st.just(0.0), min_size=1, max_size=20), st.integers(2, 32))
def test_logarithmic_codes_keep_ratios_and_zeros(values, bits):
    x = torch.tensor(values, dtype=torch.float64)

    codes, span = quantise_log(x, bits)

    found = dequantise_log(codes, span, bits)
    step = float(span[1] - span[0]) / (2**bits - 2)
    assert torch.equal(found == 0, x == 0) and bool((found >= 0).all())
    ratios = torch.log2(found[x > 0]) - torch.log2(x[x > 0])
    # Logarithms and powers are good to EPS of |log2| <= 133, and of what they are taken of.
    assert bool((ratios.abs() <= step / 2 + 8 * 133 * EPS).all())


def test_logarithmic_codes_refuse_what_has_no_logarithm():
    with pytest.raises(ValueError, match=">= 0"):
        quantise_log(torch.tensor([1.0, -1e-9]), 8)
    for span in ([1.0, 0.0], [0.0, 129.0]):
        with pytest.raises(ValueError, match="low <= high <= 128"):
            dequantise_log(torch.tensor([1]), torch.tensor(span), 8)
    with pytest.raises(ValueError, match="0 to 255"):
        dequantise_log(torch.tensor([256]), torch.tensor([0.0, 1.0]), 8)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (6, 25), (3, 2, 5, 5), (40, 3), (1, 1)])
@pytest.mark.parametrize("bits", [2, 7, 12])
@pytest.mark.parametrize("rows", [True, False])
def test_tensors_of_any_shape_come_back_in_the_bytes_counted(shape, bits, rows):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for part, sent in ((Uniform(shape, bits, rows), x), (Logarithmic(shape, bits), x.square())):
        data = part.encode(sent)
        reader = Reader(data)

        found = part.decode(reader)

        assert len(data) == part.length and reader.left == 0
        assert found.shape == shape
        if isinstance(part, Uniform):
            bound = float(sent.abs().max()) / (2 * levels(bits)) * (1 + 8 * EPS)
            assert float((found - sent).abs().max()) <= bound


def test_a_scale_is_sent_for_each_row_where_rows_are_long():
    assert Uniform((10, 16), 8).length == 10 * 4 + 160
    assert Uniform((10, 15), 8).length == 4 + 150
    assert Uniform((10, 16), 8, rows=False).length == 4 + 160
