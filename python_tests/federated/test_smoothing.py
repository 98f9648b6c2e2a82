"""Smoothing images: a linear filter of each image by itself, with public numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dpkernels.federated.data import FederatedData, of_synthetic
from dpkernels.federated.smoothing import response, smoothed


def _images(x, shape=(2, 9, 12)):
    labels = torch.arange(len(x)) % 3
    return FederatedData("images", x, labels, x[:5], labels[:5], 3, shape, "made up")


def _random(count=20, shape=(2, 9, 12), seed=0):
    return torch.randn(count, torch.Size(shape).numel(), generator=torch.manual_seed(seed))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 8), (9, 12), (32, 32)])
@pytest.mark.parametrize("exponent", [0.5, 2.0])
def test_the_mean_of_an_image_stays_and_high_frequencies_lose(height, width, exponent):
    gain = response(height, width, exponent)
    rows, columns = (torch.fft.fftfreq(n).double() * n for n in (height, width))
    order = (rows.square()[:, None] + columns.square()).flatten().argsort()
    assert gain[0, 0] == 1 and gain.min() > 0
    assert (gain.flatten()[order].diff() <= 0).all()
    if gain.numel() > 1:
        assert gain.flatten()[order][1] < 1


def test_no_direction_of_the_records_becomes_longer():
    x = _random(50)
    before, after = (torch.linalg.svdvals(part) for part in (x, smoothed(_images(x), 0.5).x))
    # Local steps that are stable on the records stay so: curvature is that of their covariance.
    assert (after <= before * (1 + 1e-5)).all() and after.sum() < 0.9 * before.sum()


def test_a_wave_is_multiplied_by_the_response_of_its_frequency():
    height, width = 9, 12
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    wave = torch.cos(2 * torch.pi * (2 * rows / height + 3 * columns / width))
    data = _images(wave.expand(6, 2, height, width).flatten(1).contiguous())
    found = smoothed(data, 1.0).x.view(6, 2, height, width)
    gain = float(response(height, width, 1.0)[2, 3])
    # The FFT's own error is a few roundings of numbers up to 1.
    assert float((found - gain * wave).abs().max()) < 16 * torch.finfo(torch.float32).eps


def test_each_image_is_smoothed_by_itself_whatever_the_others_are():
    x = _random(4100)  # more than go through the FFT at a time
    all_of_them = smoothed(_images(x), 0.5)
    alone = smoothed(_images(x[4097:4098].repeat(5, 1)), 0.5)
    torch.testing.assert_close(all_of_them.x[4097], alone.x[0])
    changed = x.clone()
    changed[0] = 1e6
    torch.testing.assert_close(smoothed(_images(changed), 0.5).x[1:], all_of_them.x[1:])


def test_the_test_part_goes_through_the_same_filter_and_the_note_says_so():
    data = smoothed(_images(_random()), 0.5)
    torch.testing.assert_close(data.x_test, data.x[:5])
    assert "smoothed with exponent 0.5" in data.note
    assert data.x.dtype == torch.float32 and data.x.is_contiguous()


def test_what_is_no_image_is_refused():
    with pytest.raises(ValueError, match=r"images \[C, H, W\].*leave smoothing out"):
        smoothed(of_synthetic(clients=5), 0.5)
    tokens = dataclasses.replace(_images(_random()), vocabulary=7)
    with pytest.raises(ValueError, match=r"images \[C, H, W\]"):
        smoothed(tokens, 0.5)
    with pytest.raises(ValueError, match="exponent"):
        smoothed(_images(_random()), 0.0)
