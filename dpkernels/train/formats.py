"""The file formats of the data sets: idx, CIFAR's, LIBSVM, CSV, npz; .gz and .xz are opened."""

from __future__ import annotations

import csv
import gzip
import lzma
import math
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

_OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}
_UBYTE = 0x08  # idx: the third byte of the magic number
_SIGNS = {b"+1": 1, b"1": 1, b"-1": 0}  # LIBSVM's labels of two classes
_CIFAR_RECORD = 1 + 3 * 32 * 32


class MissingData(FileNotFoundError):
    """The files of a data set are not where they are looked for."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open ``path``, or ``path.gz`` or ``path.xz`` where only that is there.

    Raises MissingData with the names that were looked for, ValueError for a file that cannot
    be unpacked to its end, or is no text where the block reads text.
    """
    for suffix, opener in _OPENERS.items():
        file = path.with_name(path.name + suffix)
        if not file.exists():
            continue
        try:
            with opener(file, "rb") as stream:
                yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{file} cannot be unpacked ({error}); fetch it again") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{file} is not a text file in UTF-8 ({error}); fetch it again") from (
                error
            )
        return
    raise MissingData(
        f"{path} is not there, nor with .gz or .xz; set --data-dir or $DPKERNELS_DATA to the "
        "folder that holds the data sets"
    )


def read_idx(path: Path, axes: int | None = None) -> Tensor:
    """Return the uint8 array of an idx file (MNIST's format), in its own shape.

    axes: how many it must have: 1 for labels, 3 for images; None for any.

    Raises ValueError for another type, or a file that is not as long as its header says.
    """
    with opened(path) as file:
        content = file.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UBYTE:
        raise ValueError(f"{path}: an idx file of unsigned bytes begins 00 00 08, got another")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path}: its header says {shape}, but {len(content) - start} bytes follow; the file "
            "is cut off: fetch it again"
        )
    if axes is not None and len(shape) != axes:
        raise ValueError(f"{path}: an array of {axes} axes was wanted, got {shape}")
    return _bytes(content[start:]).reshape(shape)


def read_cifar10(path: Path) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 3, 32, 32]`` uint8 and labels ``[N]`` of CIFAR-10's binary version.

    Raises ValueError for a file that does not consist of whole records.
    """
    with opened(path) as file:
        content = file.read()
    if not content or len(content) % _CIFAR_RECORD:
        raise ValueError(
            f"{path}: records are of {_CIFAR_RECORD} bytes, got {len(content)} bytes; take the "
            "binary version of CIFAR-10"
        )
    records = _bytes(content).reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def read_libsvm(path: Path, features: int) -> tuple[Tensor, Tensor]:
    """Return ``[N, features]`` float32 and labels ``[N]``, 1 for +1 and 0 for -1.

    Indices in the file begin at 1. Raises ValueError for an index beyond ``features``, or a line
    that is not in the format.
    """
    labels: list[int] = []
    rows, columns, values = [], [], []
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            label, *pairs = line.split() or [b""]
            if label not in _SIGNS:
                raise ValueError(
                    f"{path}, line {number}: it must begin with the label +1, 1 or -1, got "
                    f"{label.decode(errors='replace')!r}"
                )
            for pair in pairs:
                index, _, value = pair.partition(b":")
                if not value or not index.isdigit() or not 1 <= int(index) <= features:
                    raise ValueError(
                        f"{path}, line {number}: wanted index:value with an index from 1 to "
                        f"{features}, got {pair.decode(errors='replace')!r}"
                    )
                rows.append(len(labels))
                columns.append(int(index) - 1)
                values.append(_number(value, f"{path}, line {number}"))
            labels.append(_SIGNS[label])
    x = torch.zeros(len(labels), features)
    x[rows, columns] = torch.tensor(values)
    return x, torch.tensor(labels)


def read_csv(path: Path, *columns: str) -> Iterator[tuple[str, ...]]:
    """Yield the named columns of every row. Raises ValueError where header or row lack one."""
    csv.field_size_limit(sys.maxsize)
    with opened(path) as file:
        rows = csv.reader(line.decode("utf-8") for line in file)
        header = next(rows, [])
        if missing := set(columns) - set(header):
            raise ValueError(
                f"{path}: the first line must name the columns {', '.join(columns)}; it lacks "
                f"{', '.join(sorted(missing))}"
            )
        places = [header.index(column) for column in columns]
        for row in filter(None, rows):  # without empty lines
            if len(row) <= max(places):
                raise ValueError(
                    f"{path}, line {rows.line_num}: a row of {len(header)} columns was wanted, got "
                    f"{len(row)}"
                )
            yield tuple(row[place] for place in places)


def read_npz(path: Path, *names: str) -> tuple[Tensor, ...]:
    """Return the named arrays of NumPy's archive of arrays, in their own shapes and types.

    Raises ValueError for another format, an array that is missing, or one of no numbers.
    """
    found: list[Tensor] = []
    with opened(path) as file:
        try:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            if missing := set(names) - set(arrays.files):
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
            for name in names:
                array = arrays[name]
                if array.dtype.kind not in "biuf":
                    raise ValueError(f"{name} is of the type {array.dtype}")
                found.append(torch.from_numpy(np.ascontiguousarray(array)))
        except (ValueError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path}: an .npz file with arrays of numbers {', '.join(names)} was wanted, but "
                f"{error}; fetch it again"
            ) from error
    return tuple(found)


def _number(text: bytes, where: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(
            f"{where}: a finite number was wanted, got {text.decode(errors='replace')!r}"
        )
    return found


def _bytes(content: bytes) -> Tensor:
    if not content:  # which frombuffer does not take
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
