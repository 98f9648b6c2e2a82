"""The data sets that ``dpkernels train`` knows, and what of them is public.

Nothing here is computed from the private records: constants of normalisation are those that were
published with the data sets long ago, features of texts are hashed. The number of records is taken
for public, and so is the test part, which accuracy is measured on, unless records are held out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpkernels.train.formats import MissingData, read_cifar10, read_csv, read_idx, read_libsvm
from dpkernels.train.text import (
    FEATURES,
    VOCABULARY,
    InverseFrequencies,
    hashed_tf_idf,
    hashed_tokens,
)

Kind = Literal["image", "binary", "text", "tokens"]

# Per channel, of pixels in [0, 1]: mean and standard deviation. MNIST's are those of PyTorch's own
# example and of the paper; the others are as widely published. All were computed from training
# images that are public; a private data set needs constants from elsewhere, as digits has them.
_MNIST = ([0.1307], [0.3081])
_FASHION = ([0.2860], [0.3530])
_CIFAR10 = ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
_DIGITS = ([0.5], [0.5])  # the range of the pixels, [0, 1], becomes [-1, 1]
PIXELS = {"mnist": _MNIST, "fashion": _FASHION, "cifar10": _CIFAR10, "digits": _DIGITS}
_ADULT_FEATURES = 123
_CIFAR10_TEST = 10_000


class Records(Dataset[tuple[Tensor, Tensor]]):
    """Inputs ``[N, ...]`` (float32; tokens int64) and labels ``[N]`` int64, fetched in batches."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if len(x) != len(y):
            raise ValueError(f"Records: {len(x)} inputs have {len(y)} labels; one each is wanted")
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch; one copy instead of one for each record."""
        at = torch.as_tensor(indices, dtype=torch.long)
        return self.x[at], self.y[at]


@dataclass(frozen=True)
class Data:
    """One data set, ready for training.

    kind: what inputs are: images ``[C, H, W]``, vectors of zeros and ones, TF-IDF features of
        texts, or their tokens ``[T]``.
    note: what a reader of results should know: which part it is, where constants come from.

    Raises ValueError for a part without records, or labels that are not below ``classes``.
    """

    name: str
    kind: Kind
    classes: int
    train: Records
    test: Records
    note: str

    def __post_init__(self) -> None:
        for name, part in (("training", self.train), ("test", self.test)):
            if not len(part):
                raise ValueError(f"{self.name}: the {name} part must have records, got none")
            low, high = int(part.y.min()), int(part.y.max())
            if low < 0 or high >= self.classes:
                raise ValueError(
                    f"{self.name}: labels of the {name} part must be 0 to {self.classes - 1}, got "
                    f"{low} to {high}; is another data set in its folder?"
                )

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there can be; None for other inputs."""
        return VOCABULARY if self.kind == "tokens" else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.train.x.shape[1:])


def folder_of(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return where data sets are: ``data_dir``, or ``$DPKERNELS_DATA``.

    Raises ValueError if neither is given, MissingData if it is not a folder.
    """
    found = data_dir or os.environ.get("DPKERNELS_DATA")
    if not found:
        raise ValueError(
            "data_dir: where the data sets are is not known; pass --data-dir or set "
            "$DPKERNELS_DATA, or take --dataset digits, which needs no files"
        )
    if not Path(found).is_dir():
        raise MissingData(f"data_dir: {found} is not a folder")
    return Path(found)


def _digits(data_dir: str | None) -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RuntimeError(
            "digits: the images are scikit-learn's; pip install 'dpkernels[data]'"
        ) from None
    found = load_digits()
    images = torch.as_tensor(found.images).unsqueeze(1) * (255 / 16)
    x, y = normalised(images, *_DIGITS), torch.as_tensor(found.target)
    # There is no official split. This one is the same for everybody.
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    note = "scikit-learn's digits, 8 x 8, split 1437 / 360 by a fixed permutation"
    return Data("digits", "image", 10, Records(x[train], y[train]), Records(x[test], y[test]), note)


def _idx(name: str, folder: str, constants: tuple[list[float], list[float]]) -> Loader:
    def load(data_dir: str | None) -> Data:
        root = folder_of(data_dir) / folder

        def part(prefix: str) -> Records:
            x, y = idx_part(root, prefix, classes=10)
            return Records(normalised(x, *constants), y)

        note = "normalised by published constants"
        return Data(name, "image", 10, part("train"), part("t10k"), note)

    return load


def idx_part(root: Path, prefix: str, classes: int) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 1, 28, 28]`` uint8 and labels ``[N]`` int64 of a part in idx files.

    prefix: how the two names begin, ``train`` say. Raises ValueError, naming the file, where they
    do not belong together or to a data set with so many classes.
    """
    images, labels = root / f"{prefix}-images-idx3-ubyte", root / f"{prefix}-labels-idx1-ubyte"
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != (28, 28):
        raise ValueError(f"{images}: images must be [28, 28], got {list(x.shape[1:])}")
    if len(x) != len(y):
        raise ValueError(
            f"{images}: it has {len(x)} images, but {labels} has {len(y)} labels; fetch both again"
        )
    check_labels(labels, y, classes)
    return x.unsqueeze(1), y.long()


def _cifar10(data_dir: str | None) -> Data:
    root = folder_of(data_dir) / "cifar10"
    names = [f"data_batch_{n}.bin" for n in range(1, 6)]
    there = [name for name in names if list(root.glob(f"{name}*"))]

    def part(files: Sequence[str]) -> Records:
        batches = [read_cifar10(root / name) for name in files]
        for name, (_, labels) in zip(files, batches, strict=True):
            check_labels(root / name, labels, 10)
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return Records(normalised(x, *_CIFAR10), y)

    note = "normalised by published constants"
    if len(there) < len(names):
        note += f"; only {len(there)} of the {len(names)} training batches are there"
    train, test = part(there or names), part(["test_batch.bin"])
    if len(test) < _CIFAR10_TEST:
        note += f"; only {len(test)} of the {_CIFAR10_TEST} test images are there"
    return Data("cifar10", "image", 10, train, test, note)


def _adult(data_dir: str | None) -> Data:
    root = folder_of(data_dir) / "adult-a9a"

    def part(name: str) -> Records:
        x, y = read_libsvm(root / name, _ADULT_FEATURES)
        check_labels(root / name, y, 2)
        return Records(x, y)

    train, test = part("a9a"), part("a9a.t")
    return Data("adult", "binary", 2, train, test, "LIBSVM's a9a: binary features, as they are")


def _imdb(data_dir: str | None, tokens: bool = False, features: int = FEATURES) -> Data:
    root = folder_of(data_dir)
    # Weights of words are TF-IDF's; tokens have none.
    frequencies = InverseFrequencies([] if tokens else _agnews_texts(root))

    def part(name: str) -> Records:
        file = root / "imdb" / name
        rows = list(read_csv(file, "label", "text"))
        if strange := {label for label, _ in rows} - {"0", "1"}:
            raise ValueError(f"{file}: labels must be 0 or 1, got {min(strange)!r}")
        labels = torch.tensor([int(label) for label, _ in rows])
        check_labels(file, labels, 2)
        texts = [text for _, text in rows]
        return Records(_text_inputs(texts, frequencies, tokens, features), labels)

    source = f"{frequencies.texts} texts of AG News" if frequencies.texts else "nowhere: all 1"
    train, test = part("train.csv"), part("test.csv")
    if tokens:
        note = f"the first {train.x.shape[1] - 1} words of a text, hashed"
        return Data("imdb", "tokens", 2, train, test, note)
    note = f"words hashed to {features} places, weights of words from {source}"
    return Data("imdb", "text", 2, train, test, note)


def check_labels(file: Path, labels: Tensor, classes: int) -> None:
    """Raise ValueError, naming the file, if it has no records, or others than the data set's."""
    if not len(labels):
        raise ValueError(f"{file}: it must have records, got none; fetch it again")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(
            f"{file}: labels must be 0 to {classes - 1}, got {int(labels.min())} to "
            f"{int(labels.max())}; is it of another data set?"
        )


def _text_inputs(
    texts: Sequence[str], frequencies: InverseFrequencies, tokens: bool, features: int
) -> Tensor:
    return hashed_tokens(texts) if tokens else hashed_tf_idf(texts, frequencies, features)


def _agnews_texts(root: Path) -> list[str]:
    files = sorted({file.name.split(".csv")[0] for file in (root / "agnews").glob("*.csv*")})
    return [text for name in files for (text,) in read_csv(root / "agnews" / f"{name}.csv", "text")]


def normalised(pixels: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """Return (pixels / 255 - mean) / std of ``[N, C, H, W]``, in float32."""
    shift, scale = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (mean, std))
    return (pixels.float() / 255 - shift) / scale


Loader = Callable[[str | None], Data]

DATASETS: dict[str, Loader] = {
    "digits": _digits,
    "mnist": _idx("mnist", "mnist", _MNIST),
    "fashion": _idx("fashion", "fashion-mnist", _FASHION),
    "cifar10": _cifar10,
    "imdb": _imdb,
    "adult": _adult,
}
IMAGES = frozenset({"digits", "mnist", "fashion", "cifar10"})
TEXTS: dict[str, Callable[[str | None, bool, int], Data]] = {"imdb": _imdb}


def held_out(data: Data, records: int) -> Data:
    """Return ``data`` with that many of its training records in the place of the test part.

    They are drawn by a fixed permutation, of the number of records, which is public. Nothing is
    trained on them, so that settings can be chosen by them, and the test part stays unseen. They
    are private: epsilon does not cover accuracy on them.

    Raises ValueError unless some records are left for training.
    """
    count = len(data.train)
    if not 1 <= records < count:
        raise ValueError(
            f"validation must be 1 to {count - 1}, fewer than the {count} training records, got "
            f"{records}"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    test, train = (
        Records(*data.train.__getitems__(at.tolist()))
        for at in order.split([records, count - records])
    )
    note = (
        f"{data.note}; accuracy is of {records} training records, which were left out of training: "
        "epsilon does not cover it"
    )
    return replace(data, train=train, test=test, note=note)


# Public data of the same shape as a private data set's, as in the paper.
_PROXIES = {"mnist": "fashion", "fashion": "mnist"}


def load(
    name: str, data_dir: str | None = None, *, tokens: bool = False, features: int = FEATURES
) -> Data:
    """Return the data set of that name.

    tokens: of texts, tokens in their order instead of TF-IDF features.
    features: how many places words are hashed to for the latter.

    Raises ValueError for one that is not known, or tokens of what is not text.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {name!r}")
    if name in TEXTS:
        return TEXTS[name](data_dir, tokens, features)
    if tokens:
        raise ValueError(
            f"dataset: models of tokens need texts, {', '.join(TEXTS)}, got {name}; take another "
            "--model"
        )
    return DATASETS[name](data_dir)


def load_public(
    name: str, data_dir: str | None = None, *, tokens: bool = False, features: int = FEATURES
) -> tuple[Tensor, str]:
    """Return inputs of another, public data set that fit the private ``name``, and what they are.

    tokens, features: as for ``load``. Raises ValueError where there is none.
    """
    if name == "imdb":
        texts = _agnews_texts(folder_of(data_dir))
        if not texts:
            raise MissingData(f"agnews: {folder_of(data_dir)}/agnews has no .csv files")
        return _text_inputs(texts, InverseFrequencies(texts), tokens, features), "AG News"
    if name not in _PROXIES:
        known = ", ".join([*_PROXIES, "imdb"])
        raise ValueError(
            f"dataset: public data of the same shape is known for {known}, not for {name}; take a "
            "method with synthetic probes, dp-kfc"
        )
    return load(_PROXIES[name], data_dir).train.x, _PROXIES[name]
