"""Small files in the true formats of the data sets."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

REAL = Path(
    os.environ.get("DPKERNELS_DATA")
    or Path(__file__).resolve().parents[2].parent / "shared" / "data"
)


def real_data(folder: str) -> str:
    """Return the folder of all data sets, if this one is in it; else skip."""
    if not (REAL / folder).is_dir():
        pytest.skip(f"{folder} is not in $DPKERNELS_DATA or ../shared/data")
    return str(REAL)


def write(path: Path, content: bytes) -> None:
    """Write ``content``, compressed as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(content))


def write_idx(path: Path, array: Tensor) -> None:
    """Write uint8 ``array``: 00 00 08, the number of axes, their lengths, the bytes."""
    lengths = b"".join(n.to_bytes(4, "big") for n in array.shape)
    write(path, bytes([0, 0, 8, array.dim()]) + lengths + bytes(array.flatten().tolist()))


def write_mnist(folder: Path, train: int = 12, test: int = 5) -> dict[str, Tensor]:
    """Write a data set in MNIST's four files; return what is in them."""
    generator = torch.Generator().manual_seed(0)
    written = {}
    for part, count in (("train", train), ("t10k", test)):
        images = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (count,), generator=generator, dtype=torch.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels)
        written |= {f"{part} images": images, f"{part} labels": labels}
    return written


def write_cifar10(path: Path, images: Tensor, labels: Tensor) -> None:
    """Write images ``[N, 3, 32, 32]`` and labels as CIFAR-10's binary version has them."""
    rows = torch.cat([labels.to(torch.uint8).unsqueeze(1), images.flatten(1)], dim=1)
    write(path, bytes(rows.flatten().tolist()))


def write_adult(folder: Path, train: int = 400, test: int = 200) -> None:
    """Write people of two kinds: feature 1 to 3 for +1, 4 to 6 for -1, and one that says nothing.

    A quarter of the marks is missing, so that it takes more than one feature to tell them apart.
    """
    generator = torch.Generator().manual_seed(1)
    for name, count in (("a9a.gz", train), ("a9a.t.gz", test)):
        lines = []
        for draws in torch.rand(count, 5, generator=generator):
            rich = bool(draws[0] < 0.5)
            marks = [n for n in range(3) if draws[1 + n] < 0.75]
            features = [n + (1 if rich else 4) for n in marks] + [7 + int(draws[4] * 100)]
            pairs = " ".join(f"{feature}:1" for feature in features)
            lines.append(f"{'+1' if rich else '-1'} {pairs} \n")
        write(folder / name, "".join(lines).encode())


def write_imdb(folder: Path, texts: int = 24) -> None:
    """Write short texts that one word tells apart, as training and as test part."""
    rows = [[n % 2, f"a {'good' if n % 2 else 'bad'} film, number {n}"] for n in range(texts)]
    for part in ("train", "test"):
        write_csv(folder / f"{part}.csv.gz", ["label", "text"], rows)


def write_csv(path: Path, header: list[str], rows: list[list[object]]) -> None:
    """Write a table, texts in quotes where they need them."""
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    write(path, text.getvalue().encode())
