"""Plots show the numbers that they are given, and say that they are not private."""

from __future__ import annotations

import pytest
import torch

from dpkernels.precondition.diagnostics import Alignment, kronecker_spectrum
from dpkernels.precondition.diagnostics_hessian import Spectrum
from dpkernels.precondition.diagnostics_plots import (
    plot_alignment,
    plot_clipping,
    plot_hessian,
    plot_signal_to_noise,
    plot_spectra,
    thinned,
)
from python_tests.optional_packages import optional_package

optional_package("matplotlib")

GENERATOR = torch.Generator().manual_seed(0)


def factors() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rows = [torch.randn(9, size, generator=GENERATOR, dtype=torch.float64) for size in (4, 3)]
    a, g = (x.T @ x for x in rows)
    return {"x": (a, g), "y": (g, a)}


def row(value: float) -> Alignment:
    return Alignment(*(value + 0.1 * n for n in range(6)))


SOURCES = {"oracle": factors(), "pink": factors()}
HISTORY = {
    "pink": {0: {"x": row(0.1), "y": row(0.3)}, 5: {"x": row(0.2), "y": row(0.4)}},
    "public": {0: {"x": row(0.1), "y": row(0.2)}, 5: {"x": row(0.1), "y": row(0.2)}},
}
RATIOS = {"dp-sgd": {"x": 0.1, "y": 2.0}, "oracle": {"x": 0.5, "y": 1.0}}
NORMS = {"dp-sgd": torch.tensor([3.0, 1.0, 2.0, 4.0]), "oracle": torch.tensor([0.5, 0.6])}
SPECTRA = {
    "oracle": Spectrum(torch.tensor([-1.0, 3.0]).double(), torch.tensor([0.5, 0.5]).double(), 10),
    "pink": Spectrum(torch.tensor([0.0, 2.0]).double(), torch.tensor([0.9, 0.1]).double(), 10),
}
PLOTS = {
    "spectra": (lambda **how: plot_spectra(SOURCES, **how), ["oracle", "pink"]),
    "alignment": (lambda **how: plot_alignment(HISTORY, **how), ["pink", "public"]),
    "snr": (lambda **how: plot_signal_to_noise(RATIOS, **how), ["dp-sgd", "oracle"]),
    "clipping": (
        lambda **how: plot_clipping(NORMS, 2.5, **how),
        ["dp-sgd: 50% clipped", "oracle: 0% clipped"],
    ),
    "hessian": (lambda **how: plot_hessian(SPECTRA, **how), ["oracle", "pink"]),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_figure_names_its_curves_and_says_that_it_is_not_private(name, tmp_path) -> None:
    draw, labels = PLOTS[name]
    figure = draw()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    assert "not private, must not be published" in figure.get_supxlabel()
    assert draw(not_private=None).get_supxlabel() == ""
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(styles) >= len(labels)  # told apart without colours, too
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_legend_does_not_leave_its_figure() -> None:
    ratios = {f"dp-kfc, a source with a long name {n}": {"x": 1.0} for n in range(5)}
    figure = plot_signal_to_noise(ratios)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_spectra_are_the_sorted_eigenvalues_of_each_layer() -> None:
    left, right = plot_spectra(SOURCES).axes
    assert [axes.get_title("left") for axes in (left, right)] == ["layer x", "layer y"]
    wanted = kronecker_spectrum(*SOURCES["pink"]["x"])
    assert list(left.lines[1].get_ydata()) == wanted.tolist()
    assert list(left.lines[1].get_xdata()) == list(range(1, 13))
    (only,) = plot_spectra(SOURCES, layers=["y"]).axes
    assert only.get_title("left") == "layer y"


def test_alignment_is_drawn_over_steps_by_layer_or_group() -> None:
    above, _, below, _ = plot_alignment(HISTORY).axes
    assert list(above.lines[0].get_xdata()) == [0, 5]
    # Fields in order: cosines of A, G, F, then errors.
    assert list(above.lines[0].get_ydata()) == pytest.approx([0.3, 0.4])
    assert list(below.lines[0].get_ydata()) == pytest.approx([0.6, 0.7])
    above, below = plot_alignment(HISTORY, factor="a", groups={"both": ["x", "y"]}).axes
    assert above.get_title("left") == "both"
    assert list(above.lines[0].get_ydata()) == pytest.approx([0.2, 0.3])
    assert list(below.lines[0].get_ydata()) == pytest.approx([0.5, 0.6])


def test_a_bound_clips_what_is_longer() -> None:
    (axes,) = plot_clipping(NORMS, 2.5).axes
    line = axes.lines[0]
    points = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert points == {1.0: 75.0, 2.0: 50.0, 3.0: 25.0, 4.0: 0.0}


def test_ratios_are_drawn_from_the_first_layer_to_the_last() -> None:
    (axes,) = plot_signal_to_noise(RATIOS).axes
    assert list(axes.lines[0].get_ydata()) == [0.1, 2.0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["x", "y"]


def test_long_names_leave_room_for_the_curves() -> None:
    ratios = {"dp-sgd": {f"blocks.{n}.attention.out_proj": 1.0 + n for n in range(12)}}
    figure = plot_signal_to_noise(ratios)
    figure.draw_without_rendering()
    # As much as with short names: the height of a figure of one row is 3.8, half of it curves.
    assert figure.axes[0].bbox.height / figure.dpi >= 1.9


def test_the_hessian_is_drawn_as_density_and_as_decay() -> None:
    left, right = plot_hessian(SPECTRA).axes
    x, y = left.lines[1].get_xdata(), left.lines[1].get_ydata()
    step = x[1] - x[0]
    # The grid ends four widths after the last node, where a Gaussian has 3e-5 left on either side.
    assert float(sum(y)) * step == pytest.approx(1, abs=1e-4)
    assert list(right.lines[0].get_ydata()) == [3.0, 1.0]
    assert list(right.lines[0].get_xdata()) == pytest.approx([5, 10])


def test_long_curves_keep_their_ends() -> None:
    at = thinned(100_000)
    assert at[0] == 0 and at[-1] == 99_999 and len(at) <= 400
    assert thinned(3).tolist() == [0, 1, 2]
