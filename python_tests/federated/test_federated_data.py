"""Loaders give flat records of known shapes; statistics of private records are declared as such."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from dpkernels.federated.data import (
    DATASETS,
    FederatedData,
    declared_public,
    holdout,
    load,
    of_synthetic,
)
from dpkernels.federated.partitions import by_class, iid
from dpkernels.train.formats import MissingData, read_npz
from python_tests.optional_packages import optional_package
from python_tests.train.files import real_data, write, write_adult, write_idx, write_mnist


def vectors(count=300, features=5, *, natural=None, seed=0):
    """Return data of correlated features with unlike scales."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator)
    x, x_test = (
        torch.randn(n, features, generator=generator) @ mixing + torch.arange(features)
        for n in (count, 50)
    )
    y, y_test = (torch.randint(3, (n,), generator=generator) for n in (count, 50))
    return FederatedData("vectors", x, y, x_test, y_test, 3, (features,), "made up", natural)


def write_features(root, x_train, y_train, x_test, y_test):
    packed = io.BytesIO()
    np.savez_compressed(packed, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    write(root / "features" / "cifar10-resnet20.npz", packed.getvalue())


def write_bymerge(folder, prefixes, images, labels):
    for prefix in prefixes:
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_npz_gives_the_arrays_asked_for_in_their_own_types(tmp_path, suffix):
    x, y = np.arange(6, dtype=np.float16).reshape(2, 3), np.array([1, 0], dtype=np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, x=x, y=y, more=x)
    write(tmp_path / f"a.npz{suffix}", packed.getvalue())
    labels, features = read_npz(tmp_path / "a.npz", "y", "x")
    assert labels.dtype == torch.uint8 and labels.tolist() == [1, 0]
    assert features.dtype == torch.float16 and features.tolist() == x.tolist()
    with pytest.raises(ValueError, match=r"a\.npz: .*x, z was wanted, but it lacks z; fetch"):
        read_npz(tmp_path / "a.npz", "x", "z")


def test_what_is_no_npz_of_numbers_is_refused(tmp_path):
    for name, array in (("words", ["a"]), ("objects", [{}])):
        np.savez(tmp_path / f"{name}.npz", x=np.array(array))
    np.savez(tmp_path / "whole.npz", x=np.arange(999))
    write(tmp_path / "cut.npz", (tmp_path / "whole.npz").read_bytes()[:-30])
    write(tmp_path / "other.npz", b"\x89PNG\r\n")
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.arange(3))
    for name in ("words", "objects", "cut", "other", "one"):
        with pytest.raises(ValueError, match=rf"{name}\.npz: an \.npz file .* x was wanted, but"):
            read_npz(tmp_path / f"{name}.npz", "x")
    write(tmp_path / "empty.npz", b"")
    with pytest.raises(ValueError, match=r"empty\.npz .*fetch it again"):
        read_npz(tmp_path / "empty.npz", "x")


def test_digits_are_the_default_and_need_no_files(monkeypatch):
    optional_package("sklearn")
    monkeypatch.delenv("DPKERNELS_DATA", raising=False)
    data = load()
    assert (data.x.shape, data.x_test.shape, data.shape) == ((1437, 64), (360, 64), (1, 8, 8))
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64 and data.classes == 10


def test_images_are_flat_and_normalised_by_constants(tmp_path):
    written = write_mnist(tmp_path / "mnist")
    data = load("mnist", tmp_path)
    pixels = written["train images"].flatten(1).float() / 255
    torch.testing.assert_close(data.x, (pixels - 0.1307) / 0.3081)
    assert torch.equal(data.y_test, written["t10k labels"].long()) and data.shape == (1, 28, 28)
    write_adult(tmp_path / "adult-a9a", 12, 5)
    adult = load("adult", tmp_path)
    assert adult.x.shape == (12, 123) and set(adult.x.flatten().tolist()) == {0.0, 1.0}


def test_published_files_of_emnist_are_turned_upright(tmp_path):
    images = torch.zeros(4, 28, 28, dtype=torch.uint8)
    images[:, 3, 5:20] = 255  # a stroke across, when upright
    labels = torch.tensor([0, 46, 10, 36], dtype=torch.uint8)
    write_bymerge(tmp_path / "a" / "emnist-bymerge", ("train", "t10k"), images, labels)
    published = ("emnist-bymerge-train", "emnist-bymerge-test")
    on_their_side = images.transpose(1, 2).contiguous()
    write_bymerge(tmp_path / "b" / "emnist-bymerge", published, on_their_side, labels)
    upright, turned = (load("emnist-bymerge", tmp_path / folder) for folder in "ab")
    assert torch.equal(upright.x, turned.x) and torch.equal(upright.x_test, turned.x_test)
    torch.testing.assert_close(upright.x[0, 3 * 28 + 5].item(), (1 - 0.1736) / 0.3317)
    assert upright.classes == 47 and "stands in for EMNIST Balanced" in upright.note


def test_letters_are_those_of_bymerge_without_their_case(tmp_path):
    images = torch.arange(47, dtype=torch.uint8).reshape(47, 1, 1).expand(47, 28, 28)
    write_bymerge(tmp_path / "emnist-bymerge", ("train", "t10k"), images, torch.arange(47).byte())
    data = load("emnist-letters", tmp_path)
    letters = "".join(chr(ord("a") + int(label)) for label in data.y)
    assert letters == "abcdefghijklmnopqrstuvwxyz" + "abdefghnqrt" and data.classes == 26
    merged = load("emnist-bymerge", tmp_path)
    assert torch.equal(data.x, merged.x[10:]) and torch.equal(data.x_test, merged.x_test[10:])


def test_features_are_as_they_are_in_the_file(tmp_path):
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float16)
    write_features(tmp_path, x, np.arange(6).astype(np.uint8), x[:2], np.array([9, 0]))
    data = load("cifar10-features", tmp_path)
    assert torch.equal(data.x, torch.from_numpy(x).float()) and data.x.dtype == torch.float32
    assert data.y.tolist() == list(range(6)) and data.y_test.tolist() == [9, 0]
    assert data.shape == (4,) and data.classes == 10


HALVES = np.ones((3, 2), dtype=np.float16)
ZEROS = np.zeros(3, dtype=np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((HALVES, ZEROS[:2], HALVES, ZEROS), r"x_train must be \[N, 2\] .* with \[2\]; fetch"),
        ((HALVES, ZEROS, HALVES[:, :1], ZEROS), r"x_test must be \[N, 2\] .*got \[3, 1\]"),
        ((HALVES[0], ZEROS[:2], HALVES, ZEROS), r"x_train must be .*got \[2\]"),
        ((ZEROS.reshape(3, 1), ZEROS, HALVES, ZEROS), "x_train must be .* floating type.*uint8"),
        ((HALVES * np.inf, ZEROS, HALVES, ZEROS), "x_train must be finite, got infinity or NaN"),
        ((HALVES, ZEROS, HALVES, ZEROS + 10), "labels must be 0 to 9, got 10 to 10"),
        ((HALVES, ZEROS * 0.5, HALVES, ZEROS), "y_train must be integers, got torch.float64"),
        ((HALVES[:0], ZEROS[:0], HALVES, ZEROS), "it must have records, got none"),
    ],
)
def test_features_of_another_form_are_refused_by_their_file(tmp_path, arrays, message):
    write_features(tmp_path, *arrays)
    with pytest.raises(ValueError, match=rf"features/cifar10-resnet20\.npz: .*{message}"):
        load("cifar10-features", tmp_path)


def test_a_name_or_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dataset must be one of digits, .*imdb, got 'imagenet'"):
        load("imagenet")
    for name in DATASETS.keys() - {"digits", "synthetic"}:
        with pytest.raises(MissingData, match=r"--data-dir or \$DPKERNELS_DATA"):
            load(name, tmp_path)


def test_synthetic_data_comes_parted():
    data = of_synthetic(1.0, 2.0, clients=4, records=10, seed=3)
    parted = data.partition("natural", 4, 0)
    assert parted.sizes.tolist() == [8] * 4 and "synthetic(1, 2)" in data.note
    with pytest.raises(ValueError, match="natural partition of synthetic has 4, got 5; take that"):
        data.partition("natural", 5, 0)
    pooled = data.partition("iid", 5, 0)
    assert torch.equal(pooled.order, iid(32, 5, 0).order)
    assert load("synthetic").partition("natural", 100, 0).clients == 100


def test_data_is_parted_by_its_training_labels():
    data = vectors()
    assert torch.equal(data.partition("classes:2", 7, 4).order, by_class(data.y, 7, 2, 4).order)
    with pytest.raises(ValueError, match="vectors comes without one, got natural; take iid"):
        data.partition("natural", 7, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 2).double()}, r"training part must be \[4, 2\] float32 .*float64"),
        ({"x": torch.zeros(4, 3)}, r"training part must be \[4, 2\] .*got \[4, 3\]"),
        ({"y_test": torch.tensor([3])}, "test part must have labels 0 to 2, got 3 to 3"),
        ({"y": torch.zeros(0).long(), "x": torch.zeros(0, 2)}, "labels 0 to 2, got none"),
    ],
)
def test_data_that_does_not_belong_together_is_refused(change, message):
    parts = {
        "x": torch.zeros(4, 2),
        "y": torch.zeros(4).long(),
        "x_test": torch.zeros(1, 2),
        "y_test": torch.zeros(1).long(),
    }
    with pytest.raises(ValueError, match=message):
        FederatedData("mine", **parts | change, classes=3, shape=(2,), note="")


@pytest.mark.parametrize(
    ("what", "components"), [("centre", None), ("standardise", None), ("pca", 3)]
)
def test_what_is_fitted_on_private_records_says_that_epsilon_does_not_cover_it(what, components):
    data = vectors()
    found = declared_public(data, what, components)
    added = found.note.removeprefix(data.note)
    assert added.startswith(f"; {what}: ")
    assert "computed from the private records and declared public: epsilon does not cove" in added
    assert torch.equal(found.y, data.y) and found.x.shape[1] == (components or 5)
    # The test part has no say in it.
    other = declared_public(vectors(seed=0), what, components)
    changed = FederatedData(
        "vectors", data.x, data.y, data.x_test * 9, data.y_test, 3, (5,), "made up"
    )
    assert torch.equal(other.x, declared_public(changed, what, components).x)


def test_standardised_columns_have_mean_0_and_variance_1_but_constant_ones():
    data = vectors()
    data.x[:, 2] = 7.0
    found = declared_public(data, "standardise")
    assert found.x.mean(0).abs().max() < 1e-5
    variances = found.x.var(0, correction=0)
    torch.testing.assert_close(variances[[0, 1, 3, 4]], torch.ones(4))
    assert (found.x[:, 2] == 0).all()
    scale = (data.x.std(0, correction=0))[0]
    expected = (data.x_test[:, 0] - data.x[:, 0].mean()) / scale
    torch.testing.assert_close(found.x_test[:, 0], expected)


def test_principal_components_are_uncorrelated_and_of_the_largest_variances():
    data = vectors(count=5000)  # more rows than are taken at a time
    found = declared_public(data, "pca", 3)
    covariance = torch.cov(found.x.double().T, correction=0)
    expected = torch.linalg.eigvalsh(torch.cov(data.x.double().T, correction=0)).flip(0)[:3]
    torch.testing.assert_close(covariance, expected.diag(), rtol=1e-5, atol=1e-5)
    assert found.shape == (3,) and found.x_test.shape == (50, 3)
    # All of them are a rotation: distances stay.
    turned = declared_public(data, "pca", 5)
    torch.testing.assert_close(
        torch.cdist(turned.x_test, turned.x[:20]), torch.cdist(data.x_test, data.x[:20])
    )


@pytest.mark.parametrize(
    ("what", "components", "message"),
    [
        ("whiten", None, "what must be one of centre, standardise, pca, got 'whiten'"),
        ("pca", None, "components must be 1 to 5 for pca and None for others, got None for pca"),
        ("pca", 0, "components must be 1 to 5 .*got 0 for pca"),
        ("pca", 6, "components must be 1 to 5 .*got 6 for pca"),
        ("centre", 2, "None for others, got 2 for centre"),
    ],
)
def test_statistics_that_are_not_known_are_refused(what, components, message):
    with pytest.raises(ValueError, match=message):
        declared_public(vectors(), what, components)


def rows(*parts):
    return sorted(map(tuple, torch.cat([torch.cat([x, y[:, None]], 1) for x, y in parts]).tolist()))


def test_held_out_records_are_not_trained_on_and_leave_clients_as_they_were():
    data = vectors(natural=iid(300, 6, 1))
    parts = holdout(data, 40, seed=2)
    assert (len(parts.y), len(parts.y_test)) == (260, 40)
    assert rows((parts.x, parts.y), (parts.x_test, parts.y_test)) == rows((data.x, data.y))
    assert "40 training records, which are left out of training: epsilon" in parts.note
    assert torch.equal(holdout(data, 40, seed=2).x_test, parts.x_test)
    assert not torch.equal(holdout(data, 40, seed=3).x_test, parts.x_test)
    held = set(rows((parts.x_test, parts.y_test)))
    for i in range(6):
        before, after = data.natural.indices(i), parts.natural.indices(i)
        kept = [row for row in rows((data.x[before], data.y[before])) if row not in held]
        assert rows((parts.x[after], parts.y[after])) == kept
    for wrong in (0, 300):
        with pytest.raises(ValueError, match=f"records must be 1 to 299, .*got {wrong}"):
            holdout(data, wrong)


@pytest.mark.parametrize(
    ("name", "folder", "train", "test", "features", "classes"),
    [
        ("mnist", "mnist", 60_000, 10_000, 784, 10),
        ("adult", "adult-a9a", 32_561, 16_281, 123, 2),
        ("emnist-bymerge", "emnist-bymerge", 100_000, 16_323, 784, 47),
        ("emnist-letters", "emnist-bymerge", 50_561, 8_235, 784, 26),
        ("cifar10-features", "features", 50_000, 9_980, 64, 10),
        ("fashion-features", "features", 60_000, 10_000, 64, 10),
    ],
)
def test_the_real_files_have_their_known_sizes(name, folder, train, test, features, classes):
    data = load(name, real_data(folder))
    assert data.x.shape == (train, features) and data.x_test.shape == (test, features)
    assert data.classes == classes
    for labels in (data.y, data.y_test):
        assert labels.unique().tolist() == list(range(classes))


def test_the_real_digits_of_emnist_are_upright_as_those_of_mnist_are():
    root = real_data("emnist-bymerge")
    real_data("mnist")
    ours, upright = (load(name, root) for name in ("emnist-bymerge", "mnist"))
    for digit in (2, 3, 4, 5, 6, 7, 9):  # not the same when they are turned
        mean = ours.x_test[ours.y_test == digit].mean(0).reshape(28, 28)
        expected = upright.x_test[upright.y_test == digit].mean(0).reshape(28, 28)
        as_it_is, turned = (
            torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]
            for found in (mean, mean.T)
        )
        assert as_it_is > turned + 0.1, digit
