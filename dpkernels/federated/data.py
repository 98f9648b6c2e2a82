"""The data sets of federated runs, flat, and statistics of them that are declared public.

Loaders compute nothing from the private records. Pixels are scaled by published constants, other
features are as they are. The test part, the number of classes and of features are public.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from dpkernels.federated import synthetic
from dpkernels.federated.partitions import Partition, Seed, parse, stream_of
from dpkernels.train import data as centrally
from dpkernels.train.formats import read_npz

Statistic = Literal["centre", "standardise", "pca"]

# As widely published for ByClass and ByMerge, which have the same images.
_EMNIST = ([0.1736], [0.3317])
_BYMERGE_CLASSES = 47
# ByMerge's classes are digits (here below 0: no letters), A to Z, and those small letters that do
# not look like capital ones.
_LETTERS = torch.tensor([*range(-10, 0), *range(26), *(ord(c) - ord("a") for c in "abdefghnqrt")])
_ROWS = 4096  # of float64 at a time, so that a covariance needs no second copy of all records


@dataclass(frozen=True, eq=False)
class FederatedData:
    """One data set, flat, before it is parted among clients.

    x, x_test: ``[N, d]`` and ``[M, d]`` float32; tokens are whole numbers.
    y, y_test: ``[N]`` and ``[M]`` int64.
    shape: of one input before it was flattened: ``[C, H, W]`` of images, ``[d]`` of vectors.
    note: what a reader of results should know.
    natural: the partition that the data comes with, as synthetic data does; None for none.
    vocabulary: how many tokens there can be; None for other inputs.

    Raises ValueError for other shapes or types, a part without records, labels not below
    ``classes``.
    """

    name: str
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    shape: tuple[int, ...]
    note: str
    natural: Partition | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        parts = (("training", self.x, self.y), ("test", self.x_test, self.y_test))
        for part, x, y in parts:
            wanted = [len(y), math.prod(self.shape)]
            if list(x.shape) != wanted or x.dtype != torch.float32 or y.dtype != torch.int64:
                raise ValueError(
                    f"{self.name}: the {part} part must be {wanted} float32 with labels int64, got "
                    f"{list(x.shape)} {x.dtype} with {list(y.shape)} {y.dtype}"
                )
            if not len(y) or int(y.min()) < 0 or int(y.max()) >= self.classes:
                got = f"{int(y.min())} to {int(y.max())}" if len(y) else "none"
                raise ValueError(
                    f"{self.name}: the {part} part must have labels 0 to {self.classes - 1}, got "
                    f"{got}; is another data set in its folder?"
                )

    def partition(self, spec: str, clients: int, seed: Seed) -> Partition:
        """Return the training records parted as ``partitions.parse(spec)`` says.

        ``natural`` is the partition that the data comes with. Raises ValueError where there is
        none, or it is for another number of clients.
        """
        if spec != "natural":
            return parse(spec)(self.y, clients, seed)
        if self.natural is None:
            raise ValueError(
                f"partition: {self.name} comes without one, got natural; take iid or classes:2, say"
            )
        if clients != self.natural.clients:
            raise ValueError(
                f"clients: the natural partition of {self.name} has {self.natural.clients}, got "
                f"{clients}; take that number or another partition"
            )
        return self.natural


def _flat(data: centrally.Data) -> FederatedData:
    (x, y), (x_test, y_test) = ((part.x.flatten(1), part.y) for part in (data.train, data.test))
    return FederatedData(data.name, x, y, x_test, y_test, data.classes, data.shape, data.note)


def _central(name: str) -> Loader:
    return lambda data_dir: _flat(centrally.load(name, data_dir))


def _bymerge(data_dir: str | None) -> FederatedData:
    root = centrally.folder_of(data_dir) / "emnist-bymerge"
    # Under their published names, images are on their side: columns are stored as rows.
    published = any(root.glob("emnist-bymerge-train-*"))
    prefixes = ("emnist-bymerge-train", "emnist-bymerge-test") if published else ("train", "t10k")

    def part(prefix: str) -> tuple[Tensor, Tensor]:
        images, labels = centrally.idx_part(root, prefix, _BYMERGE_CLASSES)
        upright = images.transpose(2, 3) if published else images
        return centrally.normalised(upright, *_EMNIST).flatten(1), labels

    (x, y), (x_test, y_test) = map(part, prefixes)
    note = (
        f"EMNIST ByMerge, {len(y)} / {len(y_test)} records, unbalanced; it stands in for EMNIST "
        "Balanced; normalised by published constants"
    )
    return FederatedData(
        "emnist-bymerge", x, y, x_test, y_test, _BYMERGE_CLASSES, (1, 28, 28), note
    )


def _letters(data_dir: str | None) -> FederatedData:
    merged = _bymerge(data_dir)

    def part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        letters = _LETTERS[y]
        return x[letters >= 0], letters[letters >= 0]

    (x, y), (x_test, y_test) = part(merged.x, merged.y), part(merged.x_test, merged.y_test)
    note = (
        f"the letters of EMNIST ByMerge, capital and small ones merged, {len(y)} / {len(y_test)} "
        "records, unbalanced; they stand in for EMNIST Letters; normalised by published constants"
    )
    return FederatedData("emnist-letters", x, y, x_test, y_test, 26, merged.shape, note)


def _features(name: str, file: str) -> Loader:
    def load(data_dir: str | None) -> FederatedData:
        path = centrally.folder_of(data_dir) / "features" / file
        names = ("x_train", "y_train", "x_test", "y_test")
        x, y, x_test, y_test = read_npz(path, *names)
        for part, features, labels in (("train", x, y), ("test", x_test, y_test)):
            _check_features(path, part, features, labels, x.shape[-1])
            centrally.check_labels(path, labels, 10)
        note = f"{x.shape[1]} features of a ResNet-20 that was trained on CIFAR-100, as they are"
        parts = x.float(), y.long(), x_test.float(), y_test.long()
        return FederatedData(name, *parts, 10, (x.shape[1],), note)

    return load


def _check_features(path: Path, part: str, x: Tensor, y: Tensor, size: int) -> None:
    if x.dim() != 2 or x.shape[1] != size or not x.is_floating_point() or y.shape != x.shape[:1]:
        raise ValueError(
            f"{path}: x_{part} must be [N, {size}] of a floating type with y_{part} [N], got "
            f"{list(x.shape)} {x.dtype} with {list(y.shape)}; fetch it again"
        )
    if y.is_floating_point():
        raise ValueError(f"{path}: y_{part} must be integers, got {y.dtype}; fetch it again")
    if not bool(x.isfinite().all()):
        raise ValueError(f"{path}: x_{part} must be finite, got infinity or NaN; fetch it again")


def of_synthetic(
    alpha: float = 5.0, beta: float = 5.0, *, clients: int = 100, records: int = 500, seed: Seed = 0
) -> FederatedData:
    """Return ``synthetic.generate`` of these, 60 features and 10 classes, parted naturally."""
    drawn = synthetic.generate(alpha, beta, clients=clients, records=records, seed=seed)
    note = (
        f"synthetic({alpha:g}, {beta:g}) after Noble et al., {clients} clients of "
        f"{int(drawn.partition.sizes[0])} training records; test part: a share of every client"
    )
    parts = drawn.x, drawn.y, drawn.x_test, drawn.y_test
    return FederatedData("synthetic", *parts, 10, (60,), note, drawn.partition)


def _imdb(data_dir: str | None) -> FederatedData:
    data = centrally.load("imdb", data_dir, tokens=True)
    parts = (data.train.x.float(), data.train.y, data.test.x.float(), data.test.y)
    named = data.classes, data.shape, data.note
    return FederatedData("imdb", *parts, *named, vocabulary=data.vocabulary)


Loader = Callable[[str | None], FederatedData]
# Data sets of tokens: for models that take these.
TOKENS = frozenset({"imdb"})

DATASETS: dict[str, Loader] = {
    **{name: _central(name) for name in ("digits", "mnist", "fashion", "cifar10", "adult")},
    "emnist-bymerge": _bymerge,
    "emnist-letters": _letters,
    "cifar10-features": _features("cifar10-features", "cifar10-resnet20.npz"),
    "fashion-features": _features("fashion-features", "fashion-mnist-resnet20.npz"),
    "synthetic": lambda data_dir: of_synthetic(),
    "imdb": _imdb,
}


def load(name: str = "digits", data_dir: str | os.PathLike[str] | None = None) -> FederatedData:
    """Return the data set of that name; ``digits`` and ``synthetic`` need no files.

    data_dir: where data sets are; ``$DPKERNELS_DATA`` if None. For synthetic data of other numbers
    than the defaults take ``of_synthetic``.

    Raises ValueError for a name that is not known or files that are not as they should be,
    MissingData where there are none.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {name!r}")
    return DATASETS[name](None if data_dir is None else os.fspath(data_dir))


def declared_public(
    data: FederatedData, what: Statistic, components: int | None = None
) -> FederatedData:
    """Return ``data`` transformed by a statistic of its private records that is declared public.

    Epsilon does not cover it, and the note says so. The statistic is of the training part and is
    applied to both parts.

    what: ``centre``: x - mean. ``standardise``: (x - mean) / deviation, a column that is constant
        only centred. ``pca``: x - mean along the first ``components`` eigenvectors of the
        covariance, each with its largest entry positive.
    components: 1 to d, of ``pca`` alone.

    Costs N d^2 multiplications for ``pca``, in float64. Raises ValueError for what does not go
    together.
    """
    if what not in get_args(Statistic):
        raise ValueError(
            f"declared_public: what must be one of {', '.join(get_args(Statistic))}, got {what!r}"
        )
    features = data.x.shape[1]
    out_of_range = components is not None and not 1 <= components <= features
    if (what == "pca") != (components is not None) or out_of_range:
        raise ValueError(
            f"declared_public: components must be 1 to {features} for pca and None for others, got "
            f"{components} for {what}"
        )
    mean = data.x.mean(0, dtype=torch.float64)
    if components is not None:
        matrix, named = _leading(data.x, mean, components), f"{components} principal components"
    elif what == "standardise":
        variances = _variances(data.x, mean)
        matrix = torch.where(variances > 0, variances, 1.0).rsqrt()
        named = "mean and deviation of features"
    else:
        matrix, named = torch.ones_like(mean), "mean of features"
    x, x_test = (_transformed(part, mean, matrix) for part in (data.x, data.x_test))
    note = (
        f"{data.note}; {what}: {named} of the training part, computed from the private records and "
        "declared public: epsilon does not cover them"
    )
    shape = data.shape if components is None else (components,)
    return replace(data, x=x, x_test=x_test, shape=shape, note=note)


def _variances(x: Tensor, mean: Tensor) -> Tensor:
    total = torch.zeros_like(mean)
    for rows in x.split(_ROWS):
        total += (rows.double() - mean).square().sum(0)
    return total / len(x)


def _leading(x: Tensor, mean: Tensor, components: int) -> Tensor:
    """Return the directions of largest variance as columns ``[d, components]``, float64."""
    total = x.new_zeros(len(mean), len(mean), dtype=torch.float64)
    for rows in x.split(_ROWS):
        centred = rows.double() - mean
        total.addmm_(centred.T, centred)
    directions: Tensor = torch.linalg.eigh(total).eigenvectors.flip(1)[:, :components]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return directions * largest.sign()


def _transformed(x: Tensor, mean: Tensor, matrix: Tensor) -> Tensor:
    """Return (x - mean) times a matrix ``[d, k]``, or a diagonal ``[d]``, in float32."""
    found = []
    for rows in x.split(_ROWS):
        centred = rows.double() - mean
        found.append((centred @ matrix if matrix.dim() == 2 else centred * matrix).float())
    return torch.cat(found)


def holdout(data: FederatedData, records: int, seed: Seed = 0) -> FederatedData:
    """Return ``data`` with that many of its training records in the place of the test part.

    Settings can then be chosen without a look at the test part. Which records these are depends on
    the seed and the number of records alone. They are private: epsilon does not cover accuracy
    on them, nor what is chosen by it. Call it before ``declared_public``.

    Raises ValueError unless some records are left for training.
    """
    count = len(data.y)
    if not 1 <= records < count:
        raise ValueError(
            f"holdout: records must be 1 to {count - 1}, fewer than the {count} training records, "
            f"got {records}"
        )
    drawn = torch.from_numpy(stream_of(seed).permutation(count)[:records]).long()
    left = torch.ones(count, dtype=torch.bool)
    left[drawn] = False
    note = (
        f"{data.note}; accuracy is of {records} training records, which are left out of training: "
        "epsilon does not cover it"
    )
    return replace(
        data,
        x=data.x[left],
        y=data.y[left],
        x_test=data.x[drawn],
        y_test=data.y[drawn],
        note=note,
        natural=None if data.natural is None else data.natural.without(drawn, count),
    )
