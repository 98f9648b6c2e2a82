"""Probes: spectra, layouts and labels are what they say, and nothing is private unnoticed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator
from torch.utils.data import Dataset, TensorDataset

from dpkernels.precondition.probes import (
    ColouredNoise,
    Features,
    PrivateData,
    Probe,
    PublicData,
    Tokens,
)

PUBLIC = TensorDataset(torch.arange(20.0).view(20, 1), torch.arange(20))
PROBES: dict[str, Probe] = {
    "pink": ColouredNoise((3, 8, 8)),
    "white": ColouredNoise((1, 5, 7), 0.0),
    "uniform tokens": Tokens(50, 12, 4, cls=1, sep=2),
    "zipf tokens": Tokens(50, 12, 4, distribution="zipf"),
    "gaussian": Features(9, 2),
    "sparse": Features(9, 2, "sparse"),
    "binary": Features(9, 2, "binary"),
    "public": PublicData(PUBLIC),
    "oracle": PrivateData(PUBLIC, not_private=True),
}


def generator(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_the_generator_alone_decides_the_batch(probe: Probe) -> None:
    drawn = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        inputs, targets = probe.batch(32, generator(seed))
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append([*inputs, targets])
    first, same, other = drawn
    assert all(torch.equal(x, y) for x, y in zip(first, same, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    assert all(len(x) == 32 for x in first)


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_only_the_oracle_says_that_it_is_not_private(probe: Probe) -> None:
    assert (probe.not_private is not None) is isinstance(probe, PrivateData)
    assert ("PRIVATE" in probe.describe()) is isinstance(probe, PrivateData)


SIZES = [(16, 16), (15, 15), (12, 21), (9, 16), (31,), (6, 7, 8)]


def frequencies(size: tuple[int, ...]) -> torch.Tensor:
    """Return |f| in cycles per pixel on the half plane of ``rfftn``."""
    axes = [torch.fft.fftfreq(n, dtype=torch.float64) for n in size[:-1]]
    axes.append(torch.fft.rfftfreq(size[-1], dtype=torch.float64))
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0).sqrt()


@pytest.mark.parametrize("power", [0.0, 1.0, 1.8, 2.0])
@pytest.mark.parametrize("size", SIZES)
def test_power_falls_with_frequency_as_the_exponent_says(size, power) -> None:
    count = 500
    probe = ColouredNoise((2, *size), power, dtype=torch.float64)
    (images,), _ = probe.batch(count, generator())
    axes = tuple(range(2, images.dim()))
    spectrum = torch.fft.rfftn(images, dim=axes).abs().square().mean((0, 1)).flatten()
    frequency = frequencies(size).flatten()
    x, y = frequency[1:].log(), spectrum[1:].log()
    x -= x.mean()
    slope = float((x * y).sum() / x.square().sum())
    # |X|^2 is exponential, so that the logarithm of a mean over n has the standard deviation
    # 1 / sqrt(n). Frequencies that are their own or another's mirror image, at most all of them,
    # double the variance. Five standard deviations.
    bound = 5 * math.sqrt(2 / (2 * count * float(x.square().sum())))
    assert bound < 0.15  # so that the exponents above are told apart
    assert abs(slope + power) <= bound
    # The mean over images, f = 0, has the power of the lowest frequency; it is real: 2 / n.
    lowest = spectrum[1:][frequency[1:] == frequency[1:].min()].mean()
    assert abs(float((spectrum[0] / lowest).log())) <= 5 * math.sqrt(4 / (2 * count))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("size", [*SIZES, (1, 1), (1, 9)])
def test_pixels_have_mean_zero_and_variance_one(size, power) -> None:
    count = 2000
    (images,), _ = ColouredNoise((2, *size), power, dtype=torch.float64).batch(count, generator())
    # Pixels of an image depend on each other, those of different images and channels do not: every
    # image counts at least as one number.
    n = 2 * count
    assert abs(float(images.mean())) <= 5 / math.sqrt(n)
    assert abs(float(images.square().mean()) - 1) <= 5 * math.sqrt(2 / n)
    worst = images.square().mean((0, 1)) - 1
    # Each pixel on its own: 6 standard deviations for the largest of up to 336.
    assert float(worst.abs().max()) <= 6 * math.sqrt(2 / n)


def test_channels_are_independent_and_pixels_are_not() -> None:
    count, size = 1000, (14, 14)
    (images,), _ = ColouredNoise((2, *size), 1.0, dtype=torch.float64).batch(count, generator())
    between = float((images[:, 0] * images[:, 1]).mean())
    # Images as one number each, as above: the product of two has variance 1.
    bound = 5 / math.sqrt(count)
    assert abs(between) <= bound
    beside = float((images[..., 1:] * images[..., :-1]).mean())
    assert beside > bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power", [0.0, 1.0])
def test_noise_in_half_precision_is_rounded_once(dtype, power) -> None:
    (exact,), _ = ColouredNoise((2, 6, 5), power).batch(8, generator())
    (images,), _ = ColouredNoise((2, 6, 5), power, dtype=dtype).batch(8, generator())
    assert torch.equal(images, exact.to(dtype))


def test_white_noise_is_the_generators_own() -> None:
    (images,), _ = ColouredNoise((3, 4, 5), 0.0).batch(6, generator())
    assert torch.equal(images, torch.randn(6, 3, 4, 5, generator=generator()))


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
@pytest.mark.parametrize("cls", [None, 3])
@pytest.mark.parametrize("sep", [None, 7])
def test_tokens_stand_at_their_places(distribution, cls, sep) -> None:
    probe = Tokens(40, 9, 2, distribution=distribution, cls=cls, sep=sep, pad=5)
    (ids, mask), _ = probe.batch(500, generator())
    lengths = mask.sum(1)
    places = torch.arange(9)
    assert torch.equal(mask, places < lengths[:, None])
    assert (ids[~mask] == 5).all()
    first, last = int(cls is not None), int(sep is not None)
    assert set(lengths.tolist()) == set(range(1 + first + last, 10))
    if cls is not None:
        assert (ids[:, 0] == cls).all()
    if sep is not None:
        assert (ids.gather(1, lengths[:, None] - 1) == sep).all()
    inside = (places >= first) & (places < lengths[:, None] - last)
    specials = {x for x in (cls, sep, 5) if x is not None}
    assert set(ids[inside].tolist()) == set(range(40)) - specials


def test_tokens_without_padding_fill_the_sequence() -> None:
    (ids, mask), _ = Tokens(10, 6, 2, pad=None).batch(300, generator())
    assert mask.all() and set(ids.flatten().tolist()) == set(range(10))


def test_the_mask_can_be_left_out() -> None:
    inputs, _ = Tokens(10, 6, 2, mask=False).batch(4, generator())
    assert [list(x.shape) for x in inputs] == [[4, 6]]


@pytest.mark.parametrize(("distribution", "exponent"), [("uniform", 0.0), ("zipf", 1.3)])
def test_tokens_follow_their_distribution(distribution, exponent) -> None:
    probe = Tokens(30, 64, 2, distribution=distribution, exponent=exponent, pad=0, shortest=64)
    (ids, _), _ = probe.batch(2000, generator())
    weights = torch.arange(1, 30, dtype=torch.float64) ** -exponent
    probabilities = weights / weights.sum()
    counts = torch.bincount(ids.flatten(), minlength=30)[1:].double()
    n = ids.numel()
    # Counts are binomial; 5 standard deviations each.
    bound = 5 * (n * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - n * probabilities).abs() <= bound).all()


def test_sparse_rows_are_non_negative_and_of_unit_length() -> None:
    (x,), _ = Features(200, 2, "sparse", density=0.02).batch(3000, generator())
    assert (x >= 0).all()
    ulps = 200 * torch.finfo(x.dtype).eps  # of a sum of 200 squares
    assert (x.double().square().sum(1) - 1).abs().max() <= ulps
    present = (x > 0).double()
    n = present.numel()
    # Rows that would be empty, a part (1 - p)^200, have one.
    wanted = 0.02 + 0.98**200 / 200
    assert abs(float(present.mean()) - wanted) <= 5 * math.sqrt(0.02 * 0.98 / n)
    assert (present.sum(1) >= 1).all()


@pytest.mark.parametrize(("kind", "mean", "variance"), [("gaussian", 0, 1), ("binary", 0.3, 0.21)])
def test_features_have_their_moments(kind, mean, variance) -> None:
    (x,), _ = Features(50, 2, kind, density=0.3, dtype=torch.float64).batch(4000, generator())
    n = x.numel()
    assert abs(float(x.mean()) - mean) <= 5 * math.sqrt(variance / n)
    # A squared deviation has a variance of at most 2 variance^2 (of 0.021 for the binary one).
    assert abs(float((x - mean).square().mean()) - variance) <= 5 * variance * math.sqrt(2 / n)


def test_labels_are_uniform_or_from_a_function() -> None:
    n = 20_000
    _, targets = Features(1, 5).batch(n, generator())
    counts = torch.bincount(targets, minlength=5).double()
    assert len(counts) == 5 and (counts - n / 5).abs().max() <= 5 * math.sqrt(n * 0.2 * 0.8)

    def normal(size: int, generator: Generator) -> torch.Tensor:
        return torch.randn(size, 1, generator=generator)

    _, targets = ColouredNoise((1, 2, 2), classes=normal).batch(7, generator())
    assert list(targets.shape) == [7, 1] and targets.is_floating_point()


class Pairs(Dataset):
    """Records of two inputs and a target."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return torch.full((3,), float(index)), 10 * index, index


def test_records_keep_their_targets_unless_others_are_asked_for() -> None:
    (x, second), targets = PublicData(Pairs()).batch(50, generator())
    assert torch.equal(x[:, 0].long(), targets) and torch.equal(second, 10 * targets)
    assert set(targets.tolist()) == set(range(6))
    (x, _), targets = PublicData(Pairs(), classes=1).batch(50, generator())
    assert not targets.any() and x.any()
    inputs = torch.arange(8.0).view(4, 2)
    for dataset in (inputs, TensorDataset(inputs)):
        (x,), targets = PublicData(dataset, classes=3).batch(40, generator())
        assert torch.equal(x.unique(dim=0), inputs) and list(targets.shape) == [40]


def test_the_oracle_cannot_be_built_unknowingly() -> None:
    with pytest.raises(TypeError, match="not_private"):
        PrivateData(PUBLIC)
    for said in (False, None, "yes", 1):
        with pytest.raises(ValueError, match=r"not_private must be True.*no epsilon"):
            PrivateData(PUBLIC, not_private=said)
    assert "private records" in PrivateData(PUBLIC, not_private=True).not_private


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ColouredNoise((28,)), r"shape must be \(C, \*size\)"),
        (lambda: ColouredNoise((1, 0, 3)), r"sizes of at least 1, got \[1, 0, 3\]"),
        (lambda: ColouredNoise((1, 4, 4), -1.0), "power must be a finite number >= 0"),
        (lambda: ColouredNoise((1, 4, 4), classes=0), "classes must be at least 1"),
        (lambda: Tokens(5, 4, 2, cls=5), r"must be ids in \[0, 5\)"),
        (lambda: Tokens(1, 4, 2, pad=0), "vocabulary must hold more than the 1 special"),
        (lambda: Tokens(9, 2, 2, cls=1, sep=2), r"shortest must be in \[3, length = 2\]"),
        (lambda: Tokens(9, 4, 2, distribution="normal"), "must be uniform or zipf"),
        (lambda: Features(0, 2), "size must be at least 1"),
        (lambda: Features(3, 2, "dense"), "kind must be one of gaussian, sparse, binary"),
        (lambda: Features(3, 2, "binary", density=0.0), r"density must be in \(0, 1\]"),
        (lambda: PublicData(TensorDataset(torch.ones(4, 2))), "pass classes="),
        (lambda: PublicData([]), "must have records, got none"),
    ],
)
def test_what_is_wrong_is_said(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()
