"""What the loaders make of files in the formats of the data sets."""

from __future__ import annotations

import math

import pytest
import torch

from dpkernels.train.data import held_out, load, load_public
from dpkernels.train.formats import read_cifar10, read_csv, read_idx, read_libsvm
from dpkernels.train.text import (
    CLS,
    PAD,
    VOCABULARY,
    InverseFrequencies,
    hashed_tf_idf,
    hashed_tokens,
    words,
)
from python_tests.optional_packages import optional_package
from python_tests.train.files import (
    real_data,
    write,
    write_adult,
    write_cifar10,
    write_csv,
    write_idx,
    write_imdb,
    write_mnist,
)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_idx_is_read_as_it_was_written_whatever_compresses_it(tmp_path, suffix):
    array = torch.arange(2 * 3 * 5, dtype=torch.uint8).reshape(2, 3, 5)
    write_idx(tmp_path / f"images{suffix}", array)
    assert torch.equal(read_idx(tmp_path / "images"), array)


def test_files_that_are_cut_off_or_of_another_format_are_refused(tmp_path):
    write_idx(tmp_path / "whole", torch.zeros(3, 4, dtype=torch.uint8))
    write(tmp_path / "cut", (tmp_path / "whole").read_bytes()[:-1])
    write(tmp_path / "other", b"\x89PNG\r\n")
    with pytest.raises(ValueError, match=r"says \[3, 4\], but 11 bytes follow"):
        read_idx(tmp_path / "cut")
    with pytest.raises(ValueError, match="begins 00 00 08"):
        read_idx(tmp_path / "other")
    with pytest.raises(ValueError, match="records are of 3073 bytes, got 6 bytes"):
        read_cifar10(tmp_path / "other")
    for suffix in (".gz", ".xz"):
        write_idx(tmp_path / f"packed{suffix}", torch.randint(256, (99, 9), dtype=torch.uint8))
        packed = (tmp_path / f"packed{suffix}").read_bytes()
        (tmp_path / f"packed{suffix}").write_bytes(packed[:-20])
        with pytest.raises(
            ValueError, match=rf"packed\{suffix} cannot be unpacked .*fetch it again"
        ):
            read_idx(tmp_path / "packed")
        (tmp_path / f"packed{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=r"nor with \.gz or \.xz.*--data-dir"):
        read_idx(tmp_path / "absent")


def test_images_are_normalised_by_constants_and_not_by_themselves(tmp_path):
    written = write_mnist(tmp_path / "mnist")
    data = load("mnist", str(tmp_path))
    for part, name in ((data.train, "train"), (data.test, "t10k")):
        pixels = written[f"{name} images"].float() / 255
        torch.testing.assert_close(part.x[:, 0], (pixels - 0.1307) / 0.3081)
        assert torch.equal(part.y, written[f"{name} labels"].long())
    assert data.shape == (1, 28, 28) and data.classes == 10


def test_labels_of_another_data_set_are_refused_before_training(tmp_path):
    write_mnist(tmp_path / "mnist")
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte", torch.full((5,), 46).to(torch.uint8))
    with pytest.raises(
        ValueError, match="t10k-labels-idx1-ubyte: labels must be 0 to 9, got 46 to 46"
    ):
        load("mnist", str(tmp_path))


def write_all(root):
    """Write every data set that has files."""
    write_mnist(root / "mnist")
    write_adult(root / "adult-a9a", 12, 5)
    write_imdb(root / "imdb")
    write_csv(root / "agnews" / "train.csv", ["text"], [["some news"]])
    images, labels = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.tensor([3, 1, 4, 1])
    for name in ("data_batch_1.bin", "test_batch.bin"):
        write_cifar10(root / "cifar10" / name, images, labels)


BROKEN = {
    "nothing": b"",
    "a line": b"\n",
    "zeros": bytes(64),
    "no UTF-8": b"label,text\n1,\xff\xfe\n",
    "another label": b"label,text\nseven,words\n",
    "no label": b"label,text\n",
    "not a number": b"+1 1:one\n",
    "not finite": b"+1 1:inf\n",
    "an image": b"\x89PNG\r\n",
    "one class too many": bytes([11]) * 3073,
    "images without pixels": bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]),
    "no images": bytes([0, 0, 8, 3, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 28]),
    "no labels": bytes([0, 0, 8, 1, 0, 0, 0, 0]),
    "a label": bytes([0, 0, 8, 1, 0, 0, 0, 1, 5]),
    "a folder": None,
    "missing": None,
}


@pytest.mark.parametrize("what", BROKEN)
def test_whatever_is_wrong_with_a_file_it_is_named(tmp_path, what):
    write_all(tmp_path)
    folders = {"mnist": "mnist", "adult": "adult-a9a", "imdb": "imdb", "cifar10": "cifar10"}
    for dataset, folder in folders.items():
        load(dataset, str(tmp_path))
        for file in sorted((tmp_path / folder).iterdir()):
            whole = file.read_bytes()
            name = file.name.removesuffix(".gz")
            file.unlink()
            plain = file.with_name(name)
            if what == "a folder":
                plain.mkdir()
            elif what != "missing":
                plain.write_bytes(BROKEN[what])
            with pytest.raises((ValueError, OSError)) as error:
                load(dataset, str(tmp_path))
            assert f"{folder}/{name}" in str(error.value), (dataset, name)
            if what == "a folder":
                plain.rmdir()
            plain.unlink(missing_ok=True)
            file.write_bytes(whole)


def test_a_batch_is_its_records_and_may_be_empty(tmp_path):
    write_mnist(tmp_path / "mnist")
    train = load("mnist", str(tmp_path)).train
    x, y = train.__getitems__([3, 0])
    assert torch.equal(x, torch.stack([train[3][0], train[0][0]]))
    assert y.tolist() == [train[3][1], train[0][1]]
    assert train.__getitems__([])[0].shape == (0, 1, 28, 28)


def test_cifar10_keeps_channels_apart_and_says_which_part_is_there(tmp_path):
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    images[:, 1] = 255
    labels = torch.tensor([3, 1, 4, 1])
    folder = tmp_path / "cifar10"
    write_cifar10(folder / "data_batch_1.bin", images, labels)
    write_cifar10(folder / "data_batch_2.bin.xz", images, labels)
    write_cifar10(folder / "test_batch.bin.gz", images[:2], labels[:2])
    data = load("cifar10", str(tmp_path))
    assert data.train.y.tolist() == [3, 1, 4, 1, 3, 1, 4, 1] and len(data.test) == 2
    expected = torch.tensor([-0.4914 / 0.2470, (1 - 0.4822) / 0.2435, -0.4465 / 0.2616])
    torch.testing.assert_close(data.train.x.mean((0, 2, 3)), expected)
    assert "only 2 of the 5" in data.note and "only 2 of the 10000 test images" in data.note


def test_libsvm_has_ones_where_the_file_says_and_labels_from_signs(tmp_path):
    write(tmp_path / "a.gz", b"-1 1:1 3:1 \n+1 4:0.5\n+1 \n")
    x, y = read_libsvm(tmp_path / "a", 4)
    assert x.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]]
    assert y.tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match="line 1: wanted index:value with an index from 1 to 2"):
        read_libsvm(tmp_path / "a", 2)
    for line, message in ((b"\n", "line 2: it must begin with the label"), (b"+1 q:1", "'q:1'")):
        write(tmp_path / "b", b"-1 1:1\n" + line)
        with pytest.raises(ValueError, match=message):
            read_libsvm(tmp_path / "b", 4)


def test_csv_gives_the_columns_asked_for_with_quotes_and_lines_inside(tmp_path):
    text = 'He said "no",\nthen left'
    write_csv(tmp_path / "t.csv.gz", ["id", "label", "text"], [[7, 1, text]])
    assert list(read_csv(tmp_path / "t.csv", "text", "label")) == [(text, "1")]
    with pytest.raises(ValueError, match="it lacks rating"):
        list(read_csv(tmp_path / "t.csv", "rating"))
    write(tmp_path / "short.csv", b"id,label\n1,0\n\n2\n")
    with pytest.raises(ValueError, match="line 4: a row of 2 columns was wanted, got 1"):
        list(read_csv(tmp_path / "short.csv", "label"))


def test_features_of_a_text_do_not_depend_on_other_texts():
    frequencies = InverseFrequencies(["a public text", "another text"])
    mine = "The plot, the acting: all bad"
    alone = hashed_tf_idf([mine], frequencies)
    among = hashed_tf_idf(["something else", mine, "the the the"], frequencies)
    assert torch.equal(alone[0], among[1])


def test_hashed_rows_are_tf_idf_of_norm_one():
    frequencies = InverseFrequencies(["good film", "film"])
    idf = {"good": math.log(3 / 2) + 1, "film": 1.0, "unseen": math.log(3) + 1}
    assert all(abs(frequencies[word] - value) < 1e-12 for word, value in idf.items())
    row, empty = hashed_tf_idf(["Film film unseen", "!"], frequencies, features=1000)
    values = torch.tensor([idf["film"] * (1 + math.log(2)), idf["unseen"]])
    found = row[row > 0].sort().values
    torch.testing.assert_close(found, (values / values.norm()).sort().values)
    assert not empty.any()
    assert words("It's<br />ONE") == ["it's", "one"]


def test_tokens_are_hashes_in_the_order_of_the_words_and_of_one_length():
    rows = hashed_tokens(["good bad good", "", "a b c d e f g"], length=5)
    (cls, good, bad, again, last), empty, long = rows.tolist()
    assert (cls, last) == (CLS, PAD) and good == again != bad and min(good, bad) > CLS
    assert empty == [CLS, PAD, PAD, PAD, PAD]
    assert PAD not in long and long == hashed_tokens(["a b c d"], length=5)[0].tolist()
    assert rows.max() < VOCABULARY


def test_texts_are_read_as_tokens_if_asked_and_so_is_their_proxy(tmp_path):
    for part in ("train", "test"):
        write_csv(tmp_path / "imdb" / f"{part}.csv", ["label", "text"], [[0, "bad"], [1, "good"]])
    write_csv(tmp_path / "agnews" / "a.csv", ["label", "text"], [[1, "good news"]])
    data = load("imdb", str(tmp_path), tokens=True)
    assert data.kind == "tokens" and torch.equal(data.train.x, hashed_tokens(["bad", "good"]))
    inputs, _ = load_public("imdb", str(tmp_path), tokens=True)
    assert torch.equal(inputs, hashed_tokens(["good news"]))
    with pytest.raises(ValueError, match="models of tokens need texts, imdb, got mnist"):
        load("mnist", str(tmp_path), tokens=True)


def test_imdb_takes_weights_of_words_from_agnews_or_none(tmp_path):
    header = ["id", "rating", "label", "text"]
    rows = [[0, 3, 0, "bad film"], [1, 9, 1, "good film"]]
    for part in ("train", "test"):
        write_csv(tmp_path / "imdb" / f"{part}.csv.gz", header, rows)
    plain = load("imdb", str(tmp_path))
    assert plain.train.y.tolist() == [0, 1] and "nowhere" in plain.note
    torch.testing.assert_close(plain.train.x.norm(dim=1), torch.ones(2))
    write_csv(tmp_path / "agnews" / "part-2.csv.gz", ["label", "text"], [[1, "film"], [2, "film"]])
    weighted = load("imdb", str(tmp_path))
    assert "2 texts of AG News" in weighted.note
    # "film" is in every public text, so that the other word counts for more than it did.
    assert weighted.train.x[0].max() > plain.train.x[0].max()
    inputs, name = load_public("imdb", str(tmp_path))
    assert inputs.shape == (2, plain.shape[0]) and name == "AG News"


def test_the_public_proxy_has_the_shape_of_the_private_data(tmp_path):
    write_mnist(tmp_path / "mnist")
    write_mnist(tmp_path / "fashion-mnist", train=7)
    inputs, name = load_public("mnist", str(tmp_path))
    assert inputs.shape == (7, 1, 28, 28) and name == "fashion"
    with pytest.raises(ValueError, match="not for adult; take a method with synthetic probes"):
        load_public("adult", str(tmp_path))


def test_held_out_records_are_not_trained_on_and_nothing_of_the_test_part_is_left(tmp_path):
    write_mnist(tmp_path / "mnist", train=60)
    whole = load("mnist", str(tmp_path))
    parts = held_out(whole, 13)
    assert (len(parts.train), len(parts.test)) == (47, 13)

    def rows(*records):
        joined = [torch.cat([r.x.flatten(1), r.y.unsqueeze(1)], 1) for r in records]
        return sorted(map(tuple, torch.cat(joined).tolist()))

    assert len(set(rows(whole.train))) == 60
    assert rows(parts.train, parts.test) == rows(whole.train)
    # The same for everybody, and not the end of a file that may be sorted.
    assert rows(held_out(whole, 13).test) == rows(parts.test)
    assert not torch.equal(parts.test.x, whole.train.x[-13:])
    assert "13 training records, which were left out of training: epsilon" in parts.note
    for wrong in (0, 60):
        with pytest.raises(ValueError, match=f"validation must be 1 to 59, .*got {wrong}"):
            held_out(whole, wrong)


def test_digits_need_no_files():
    optional_package("sklearn")
    data = load("digits")
    assert (len(data.train), len(data.test), data.shape) == (1437, 360, (1, 8, 8))
    assert data.train.x.min() == -1 and data.train.x.max() == 1
    assert set(data.test.y.tolist()) == set(range(10))


def test_without_a_folder_the_error_names_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.delenv("DPKERNELS_DATA", raising=False)
    with pytest.raises(ValueError, match=r"--data-dir or set \$DPKERNELS_DATA"):
        load("mnist")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load("mnist", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="dataset must be one of digits, mnist"):
        load("imagenet")
    monkeypatch.setenv("DPKERNELS_DATA", str(tmp_path))
    write_adult(tmp_path / "adult-a9a", train=20, test=10)
    assert len(load("adult").train) == 20


@pytest.mark.parametrize(
    ("name", "folder", "train", "test", "share_of_class_1"),
    [
        ("mnist", "mnist", 60_000, 10_000, 6742 / 60_000),
        ("fashion", "fashion-mnist", 60_000, 10_000, 0.1),
        ("adult", "adult-a9a", 32_561, 16_281, 7841 / 32_561),
    ],
)
def test_the_real_files_have_their_known_sizes(name, folder, train, test, share_of_class_1):
    data = load(name, real_data(folder))
    assert (len(data.train), len(data.test)) == (train, test)
    share = (data.train.y == 1).double().mean().item()
    assert share == pytest.approx(share_of_class_1, rel=1e-12)
