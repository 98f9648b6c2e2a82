"""What the command leaves on the disk, read again."""

from __future__ import annotations

import json

RECORDS, TESTED, STEPS = 300, 50, 5  # round(300 / 64) steps in an epoch


def written_to(folder, suffix, table=1, epochs=1):
    """Return a file of the table; all here are trials, which their names say."""
    return folder / "out" / f"dp_kfc_table{table}_epochs-{epochs}_batch_size-64.{suffix}"


def content_of(folder, table=1, epochs=1):
    return json.loads(written_to(folder, "json", table, epochs).read_text())


def markdown_of(folder, table=1):
    return written_to(folder, "md", table).read_text()


def training_of(folder, method, epsilon=1, part="seed-0"):
    """Return the only folder of a training; its settings are not the paper's: it has a digest."""
    found = folder.glob(f"mnist-cnn/{method}-{'[0-9a-f]' * 8}/eps-{epsilon:g}/{part}")
    (only,) = found
    return only


def attempts_of(training):
    return json.loads((training / "attempts.json").read_text())


def grid(text, first):
    """Return the rows of the Markdown table whose first columns are ``first``."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    names, _, *rows = ([part.strip() for part in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]
