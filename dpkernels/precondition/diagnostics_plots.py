"""Plots of the diagnostics, for those who have matplotlib (``pip install dpkernels[plots]``).

Every figure has a line that it is not private, unless ``not_private=None`` says that no private
record is behind it. Raises RuntimeError without matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dpkernels.precondition.diagnostics import (
    NOT_PRIVATE,
    Alignment,
    FactorPairs,
    kronecker_spectrum,
    mean_alignment,
)
from dpkernels.precondition.diagnostics_gradients import clipped_fraction
from dpkernels.precondition.diagnostics_hessian import Spectrum

# What others are compared with is black and dashed, as in the paper. Colours are those of Okabe and
# Ito, which do not depend on how colours are seen, and lines differ without them.
_REFERENCE = {"color": "black", "ls": "--", "marker": "x"}
_OTHERS = (
    {"color": "#D55E00", "ls": "-", "marker": "o"},
    {"color": "#0072B2", "ls": "-.", "marker": "s"},
    {"color": "#009E73", "ls": ":", "marker": "^"},
    {"color": "#CC79A7", "ls": (0, (5, 1)), "marker": "D"},
    {"color": "#E69F00", "ls": (0, (3, 1, 1, 1)), "marker": "v"},
)
# Factors are float32: relative to the largest, what is smaller than this is rounding.
_ROUNDING = 2.0**-23
_POINTS = 400  # of a curve: more than a figure shows


def plot_spectra(
    sources: Mapping[str, FactorPairs],
    *,
    layers: Sequence[str] | None = None,
    reference: str = "oracle",
    not_private: str | None = NOT_PRIVATE,
) -> Any:
    """Return a figure of each layer's sorted eigenvalues of A (x) G by source (DP-KFC, Fig. 2, 6).

    sources: factors by the name of where they come from, all of the same layers.
    layers: which, None for all. reference: the source that is drawn in black.
    """
    layers = list(next(iter(sources.values()))) if layers is None else layers
    figure, panels = _panels(1, len(layers))
    for axes, layer in zip(panels[0], layers, strict=True):
        for source, style in _styles(sources, reference).items():
            values = kronecker_spectrum(*sources[source][layer])
            values = values[values > _ROUNDING * values[0]]
            at = thinned(len(values))
            axes.plot((at + 1).tolist(), values[at].tolist(), label=source, **_line(style))
        axes.set(xscale="log", yscale="log", xlabel="index", ylabel="eigenvalue of A x G")
        _title(axes, f"layer {layer}")
    return _finished(figure, not_private)


def plot_alignment(
    history: Mapping[str, Mapping[int, Mapping[str, Alignment]]],
    *,
    factor: Literal["a", "g", "f"] = "f",
    groups: Mapping[str, Sequence[str]] | None = None,
    not_private: str | None = NOT_PRIVATE,
) -> Any:
    """Return a figure of cosine and relative error over training (DP-KFC, Fig. 3, 8 and 9).

    history: for each source, by step, what ``align`` returned with the oracle as reference.
    factor: ``f`` for A (x) G, ``a`` or ``g`` for one of them.
    groups: layers that are averaged, by the name of the panel; None for one panel for each.
    """
    if groups is None:
        first = next(iter(next(iter(history.values())).values()))
        groups = {f"layer {name}": [name] for name in first}
    figure, panels = _panels(2, len(groups))
    for column, (group, layers) in enumerate(groups.items()):
        above, below = panels[0][column], panels[1][column]
        for source, style in _styles(history, None).items():
            steps = list(history[source])
            rows = [mean_alignment([history[source][s][name] for name in layers]) for s in steps]
            for axes, kind in ((above, "cosine"), (below, "error")):
                values = [getattr(row, f"{kind}_{factor}") for row in rows]
                axes.plot(steps, values, label=source, ms=4, **style)
        above.set_ylim(0, 1.05)
        below.set_xlabel("step")
        _scale_for(below)
        _title(above, group)
    what = "A x G" if factor == "f" else factor.upper()
    panels[0][0].set_ylabel(f"cosine similarity of {what}")
    panels[1][0].set_ylabel(f"relative error of {what}")
    return _finished(figure, not_private)


def plot_signal_to_noise(
    ratios: Mapping[str, Mapping[str, float]],
    *,
    reference: str = "oracle",
    not_private: str | None = NOT_PRIVATE,
) -> Any:
    """Return a figure of the ratio in every layer, from input to output (DP-KFC, Fig. 1).

    ratios: by method, what ``signal_to_noise`` returned.
    """
    layers = list(next(iter(ratios.values())))
    longest = max(map(len, layers))
    slanted = longest > 8 or len(layers) > 8
    # Slanted names take height: 0.06 inches a letter.
    figure, panels = _panels(
        1, 1, width=max(5.0, 0.45 * len(layers)), more_height=0.06 * longest if slanted else 0.0
    )
    axes = panels[0][0]
    for method, style in _styles(ratios, reference).items():
        axes.plot([ratios[method][name] for name in layers], label=method, ms=5, **style)
    axes.axhline(1, color="#888888", lw=1)
    axes.annotate("as much noise as signal", (0, 1), (2, 3), textcoords="offset points", fontsize=8)
    turned: dict[str, Any] = {"rotation": 45, "ha": "right"} if slanted else {}
    axes.set_xticks(range(len(layers)), layers, **turned)
    axes.set(yscale="log", xlabel="layer", ylabel="signal / noise")
    return _finished(figure, not_private)


def plot_clipping(
    norms: Mapping[str, Tensor],
    max_norm: float,
    *,
    reference: str = "oracle",
    not_private: str | None = NOT_PRIVATE,
) -> Any:
    """Return a figure of the part of the samples that a bound clips, over the bound.

    norms: by method, of all samples' gradients: ``total_norms``. max_norm: the bound in use.
    """
    figure, panels = _panels(1, 1, width=5.6)
    axes = panels[0][0]
    for method, style in _styles(norms, reference).items():
        values = norms[method].double().sort().values
        at = torch.linspace(0, len(values) - 1, min(len(values), _POINTS)).round().long()
        share = clipped_fraction({"all": values}, max_norm)
        above = 1 - (at + 1) / len(values)
        label = f"{method}: {share:.0%} clipped"
        axes.plot(values[at].tolist(), (100 * above).tolist(), label=label, **_line(style))
    axes.axvline(max_norm, color="#888888", lw=1)
    axes.annotate(
        f" clip norm {max_norm:g}",
        (max_norm, 0.02),
        xycoords=("data", "axes fraction"),
        fontsize=8,
    )
    axes.set(xscale="log", xlabel="bound on the gradient's norm", ylabel="samples clipped, %")
    axes.set_ylim(0, 103)
    return _finished(figure, not_private)


def plot_hessian(
    spectra: Mapping[str, Spectrum],
    *,
    reference: str = "oracle",
    not_private: str | None = NOT_PRIVATE,
) -> Any:
    """Return a figure of the Hessian's density and of its eigenvalues' decay (DP-KFC, Fig. 7).

    spectra: by source of the samples, what ``hessian_spectrum`` returned. In the density every node
    is as wide as a hundredth of the range of all; less than half an eigenvalue is not shown.
    """
    figure, panels = _panels(1, 2)
    left, right = panels[0]
    nodes = torch.cat([spectrum.nodes for spectrum in spectra.values()])
    low, high = float(nodes.min()), float(nodes.max())
    width = (high - low) / 100 or 1.0
    at = torch.linspace(low - 4 * width, high + 4 * width, 4 * _POINTS, dtype=torch.float64)
    for source, style in _styles(spectra, reference).items():
        spectrum = spectra[source]
        density = spectrum.density(at, width)
        left.plot(at.tolist(), density.tolist(), label=source, **_line(style))
        magnitudes, counts = spectrum.decay()
        known = magnitudes > _ROUNDING * magnitudes[0]
        right.plot(counts[known].tolist(), magnitudes[known].tolist(), label=source, **_line(style))
    size = max(spectrum.size for spectrum in spectra.values())
    peak = 1 / (width * math.sqrt(2 * math.pi))  # of all eigenvalues in one place
    left.set(
        yscale="log", xlabel="eigenvalue", ylabel="density", ylim=(0.5 * peak / size, 2 * peak)
    )
    right.set(xscale="log", yscale="log", xlabel="index", ylabel="magnitude of the eigenvalue")
    right.set_xlim(0.5, 1.2 * size)
    _title(left, "density")
    _title(right, "sorted by magnitude")
    return _finished(figure, not_private)


def thinned(count: int) -> Tensor:
    """Return indices from 0 to ``count - 1``, at most 400, as far apart as a log axis shows."""
    if count <= _POINTS:
        return torch.arange(count)
    exponents = torch.linspace(0, math.log(count), _POINTS, dtype=torch.float64)
    places: Tensor = exponents.exp().round().long().unique()
    return places - 1


def require_matplotlib() -> Any:
    """Return matplotlib's ``Figure``; raise RuntimeError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError(
            "a plot needs matplotlib; install it with: pip install 'dpkernels[plots]'"
        ) from None
    return Figure


def _panels(
    rows: int, columns: int, width: float | None = None, more_height: float = 0.0
) -> tuple[Any, Any]:
    """Return a figure and its axes ``[rows][columns]``; sizes in inches."""
    size = (width or max(5.0, 3.2 * columns), 2.6 * rows + 1.2 + more_height)
    figure = require_matplotlib()(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _finished(figure: Any, not_private: str | None) -> Any:
    """Add one legend for all panels, and the mark."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # In inches: a letter of this size is a twelfth wide, the line before it half.
    columns = int(figure.get_figwidth() / (0.8 + max(map(len, labels)) / 12))
    place = {"loc": "outside upper center", "frameon": False, "handlelength": 3.2, "fontsize": 9}
    figure.legend(handles, labels, ncols=max(1, min(columns, len(labels))), **place)
    if not_private is not None:
        figure.supxlabel(not_private, fontsize=8, color="#a00000")
    return figure


def _styles(names: Mapping[str, Any], reference: str | None) -> dict[str, dict[str, Any]]:
    others = [name for name in names if name != reference]
    styles = {name: _OTHERS[n % len(_OTHERS)] for n, name in enumerate(others)}
    return {name: dict(styles.get(name, _REFERENCE)) for name in names}


def _line(style: dict[str, Any]) -> dict[str, Any]:
    """Return the style without markers, for curves of many points."""
    return {"color": style["color"], "ls": style["ls"], "lw": 1.8}


def _scale_for(axes: Any) -> None:
    """Take a log axis where values span more than ten times, else one from 0."""
    values = [abs(y) for line in axes.lines for y in line.get_ydata() if math.isfinite(y) and y]
    if values and max(values) > 10 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.05 * max(values, default=1.0))


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=10, loc="left")
