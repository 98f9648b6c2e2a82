"""The attack's figures as Markdown and JSON, and the recovered images as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

from dpkernels.precondition.diagnostics_plots import require_matplotlib
from dpkernels.repro.federated.inversion.study import CLIENTS, DRAWS, Cell, Effort, Scene
from dpkernels.repro.federated.inversion.uploads import CLIP, RATE
from dpkernels.whole_file import whole_file

TITLE = "Gradient inversion of what is uploaded"
_TITLES = {"cifar10": "CIFAR-10", "fashion": "FashionMNIST"}


def _notes(effort: Effort) -> tuple[str, ...]:
    label = "the one by rows" if effort.known_label else "sought with the image"
    return (
        f"DLG: {effort.iterations} iterations of L-BFGS on image and label (the label is {label}), "
        f"{effort.restarts} starts of which the one with the least matching loss counts, because "
        "that is what an attacker sees. The direction of the gradient is matched: a clip changes "
        "its length.",
        f"The clients: {CLIENTS} in the round, one record and one local step each (w - w0 = -eta "
        f"gradient, eta = {RATE:g}): the easiest case for the attack. C = {CLIP:g}. LeNet with "
        "sigmoids, at random weights that everybody knows.",
        "UDP-FedAvg and FedCEO upload w0 + eta (clipped update + N(0, sigma^2 C^2 / K)), as in "
        "Algorithms 1 and 2 of the paper; the full noise, N(0, sigma^2 C^2), is what sigma means "
        "where single uploads are seen. FedCEO's slice is what its server makes of the upload "
        "with the nine others by the tensor SVD, lambda and theta as in the paper for that sigma "
        "on CIFAR-10, t = I.",
        "Rows without noise show what protects from the server: not the clip. A slice without "
        "noise (with the threshold of sigma 1) misleads DLG, because the tensor SVD shrinks w0 "
        "with the update; but who makes slices has the uploads.",
        "PSNR does not show all that is lost: the label is the last layer's row with the least sum "
        "(after iDLG), which adds up signal over all features. By rows: how often that rule is "
        "right; guessing is right one time in ten. Noise of sigma / sqrt(K) leaves it.",
        "A failed attack proves nothing: a stronger one may not fail. What holds is epsilon. The "
        "blind guess is the mean colour of the data set: below it, a server has learnt nothing "
        "that shows in PSNR.",
    )


def _figures(values: Sequence[float]) -> str:
    return f"{mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _row(cell: Cell) -> str:
    count = len(cell.psnr)
    sigma = "-" if cell.sigma is None else f"{cell.sigma:g}"
    cells = [
        cell.method,
        sigma,
        f"{cell.std:.3g}" if cell.std else "0",
        _figures(cell.psnr),
        f"{mean(cell.mse):.2g}",
        f"{mean(cell.loss):.2g}",
        f"{sum(cell.label)} / {count}",
        f"{cell.label_rate:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def markdown(scenes: Sequence[Scene], effort: Effort, where: Mapping[str, Any]) -> str:
    """Return a table for each data set, with what was done and where."""
    lines = [f"# {TITLE}", "", *(f"- {note}" for note in _notes(effort))]
    header = ["method", "sigma", "noise of an element", "PSNR, dB: mean (least to most)", "MSE"]
    header += ["matching loss", "labels found", f"labels by rows, of {DRAWS * CLIENTS}"]
    for scene in scenes:
        lines += ["", f"## {scene.name}, {len(scene.originals)} images", ""]
        lines += [f"Blind guess: {_figures(scene.blind)} dB.", ""]
        lines += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        lines += [_row(cell) for cell in scene.cells]
    seconds = sum(cell.seconds for scene in scenes for cell in scene.cells)
    lines += ["", f"{seconds:.0f} s of one core of {where['cpu']}, written at"]
    changed = " with changes" if where["dirty"] else ""
    lines.append(f"{where['commit']}{changed}, {where['time']}.")
    return "\n".join(lines) + "\n"


def to_dict(
    scenes: Sequence[Scene], effort: Effort, where: Mapping[str, Any], command: str
) -> dict[str, Any]:
    """Return all figures, in types that JSON knows; images are in the picture only."""
    names = [field.name for field in dataclasses.fields(Cell) if field.name != "images"]
    return {
        "title": TITLE,
        "notes": _notes(effort),
        "command": command,
        "provenance": dict(where),
        "effort": dataclasses.asdict(effort),
        "scenes": [
            {
                "dataset": scene.name,
                "blind": scene.blind,
                "cells": [{name: getattr(cell, name) for name in names} for cell in scene.cells],
            }
            for scene in scenes
        ],
    }


def _show(axes: Any, image: Tensor) -> None:
    axes.set(xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)
    shown = image.permute(1, 2, 0).numpy()
    if len(image) == 1:
        axes.imshow(shown[..., 0], cmap="gray", vmin=0, vmax=1)
    else:
        axes.imshow(shown)


def draw(scenes: Sequence[Scene], file: Path) -> None:
    """Draw the originals over what each method gave away, PSNR below; the least sigma only."""
    sigma = min(cell.sigma for scene in scenes for cell in scene.cells if cell.sigma is not None)
    chosen = [[c for c in scene.cells if c.sigma in (None, sigma)] for scene in scenes]
    rows, columns = 1 + len(chosen[0]), [len(scene.originals) for scene in scenes]
    widths = [width for count in columns for width in (*[1.0] * count, 0.25)][:-1]
    figure = require_matplotlib()(
        figsize=(0.9 * sum(widths) + 1.6, 1.1 * rows + 0.3), layout="constrained"
    )
    grid = figure.add_gridspec(rows, len(widths), width_ratios=widths)
    begin = 0
    for scene, cells in zip(scenes, chosen, strict=True):
        lines = [(scene.originals, None), *((cell.images, cell.psnr) for cell in cells)]
        for row, (images, figures) in enumerate(lines):
            for column, image in enumerate(images):
                panel = figure.add_subplot(grid[row, begin + column])
                _show(panel, image)
                if figures is not None:
                    panel.set_xlabel(f"{figures[column]:.1f} dB", fontsize=7, labelpad=2)
                if row == 0 and column == 0:
                    panel.set_title(_TITLES.get(scene.name, scene.name), loc="left")
                if begin == 0 and column == 0:
                    name = _names(cells, sigma)[row]
                    panel.set_ylabel(name, rotation=0, ha="right", va="center", fontsize="small")
        begin += len(scene.originals) + 1
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=110, format="png")


def _names(cells: Sequence[Cell], sigma: float) -> list[str]:
    named = [c.method + ("" if c.sigma is None else f", sigma {sigma:g}") for c in cells]
    return ["original", *(name.replace(", ", ",\n") for name in named)]
