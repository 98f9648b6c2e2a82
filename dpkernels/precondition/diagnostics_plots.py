"""Plots of the diagnostics, for those who have matplotlib (``pip install dpkernels[plots]``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpkernels.precondition.diagnostics import Alignment, Moments, kronecker_spectrum


def plot_spectra(sources: Mapping[str, Moments]) -> Any:
    """Return a figure of each layer's sorted eigenvalues of A (x) G, a curve for each source.

    sources: factors by the name of where they come from, all of the same layers (DP-KFC, Fig. 6).
    """
    from matplotlib.figure import Figure

    layers = list(next(iter(sources.values())))
    figure = Figure(figsize=(4 * len(layers), 3.2), layout="constrained")
    for axes, layer in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers, strict=True):
        for source, moments in sources.items():
            values = kronecker_spectrum(*moments[layer])
            axes.plot(range(1, len(values) + 1), values.tolist(), label=source)
        axes.set(title=layer, xscale="log", yscale="log", xlabel="index", ylabel="eigenvalue")
    axes.legend()
    return figure


def plot_alignment(history: Mapping[str, Mapping[int, Mapping[str, Alignment]]]) -> Any:
    """Return a figure of cosine and relative error of A (x) G over training (DP-KFC, Fig. 3).

    history: for each source, by step, what ``align`` returned with the oracle as reference.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for source, steps in history.items():
        for layer in next(iter(steps.values())):
            rows = [steps[step][layer] for step in steps]
            left.plot(list(steps), [row.cosine_f for row in rows], label=f"{source}, {layer}")
            right.plot(list(steps), [row.error_f for row in rows], label=f"{source}, {layer}")
    left.set(xlabel="step", ylabel="cosine similarity")
    right.set(xlabel="step", ylabel="relative Frobenius error", yscale="log")
    left.legend(fontsize="x-small")
    return figure
