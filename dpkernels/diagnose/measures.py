"""The diagnostics of one model, as numbers and figures. None of it is private."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dpkernels.diagnose.subject import Subject, train_steps
from dpkernels.precondition import diagnostics_plots as plots
from dpkernels.precondition.diagnostics import (
    NOT_PRIVATE,
    Alignment,
    align,
    estimate_factors,
    kronecker_spectrum,
)
from dpkernels.precondition.diagnostics_gradients import (
    ClippedGradients,
    clipped_fraction,
    clipped_gradients,
    signal_to_noise,
    total_norms,
)
from dpkernels.precondition.diagnostics_hessian import hessian_spectrum
from dpkernels.precondition.kfac import Kfac
from dpkernels.train.methods import METHODS, curvature_arguments, sum_of_losses
from dpkernels.whole_file import whole_file, write_text

FILE = "diagnostics.json"
ORACLE = "oracle"
_RECORDS, _BATCH = 2048, 256  # of private data that gradients are looked at for, and at a time
_HESSIAN = {"steps": 40, "vectors": 2}  # on one batch: 80 products for each source
_PANELS = 5  # layers that a figure has room for; the JSON has all
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

History = dict[str, dict[int, dict[str, Alignment]]]


@dataclass(frozen=True)
class Measured:
    """Numbers, and figures by name: matplotlib's."""

    numbers: Any
    figures: dict[str, Any]


def measure(subject: Subject, what: Sequence[str], steps: int) -> dict[str, Measured]:
    """Train for ``steps``, and return ``what`` of the model then; of alignment, on the way too.

    Raises ValueError as ``train_steps`` does, RuntimeError without matplotlib.
    """
    plots.require_matplotlib()
    history: History = {source: {} for source in subject.sources if source != ORACLE}

    def look(step: int) -> None:
        if "alignment" in what:
            factors = _factors(subject)
            for source, rows in history.items():
                rows[step] = align(factors[ORACLE], factors[source])

    train_steps(subject, steps, look)
    found: dict[str, Measured] = {}
    if "spectra" in what:
        found["spectra"] = _spectra(subject)
    if "alignment" in what:
        found["alignment"] = _alignment(history)
    if "snr" in what or "clipping" in what:
        gradients = _gradients(subject)
        if "snr" in what:
            found["snr"] = _signal_to_noise(subject, gradients)
        if "clipping" in what:
            found["clipping"] = _clipping(subject, gradients)
    if "hessian" in what:
        found["hessian"] = _hessian(subject)
    return found


def write(found: Mapping[str, Measured], subject: Subject, output: Path) -> list[Path]:
    """Write ``diagnostics.json`` and a PNG for each figure to ``output``; return the files."""
    output.mkdir(parents=True, exist_ok=True)
    content = {
        "not_private": NOT_PRIVATE,
        "options": asdict(subject.options),
        "noise_multiplier": subject.noise_multiplier,
        "sources": {
            name: {"describe": probe.describe(), "not_private": probe.not_private}
            for name, probe in subject.sources.items()
        },
        **{name: measured.numbers for name, measured in found.items()},
    }
    files = [output / FILE]
    write_text(files[0], json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")
    for measured in found.values():
        for name, figure in measured.figures.items():
            files.append(output / f"{name}.png")
            with whole_file(files[-1]) as partial:
                figure.savefig(partial, dpi=150, format="png")
    return files


def _factors(subject: Subject) -> dict[str, Any]:
    return {
        name: estimate_factors(subject.model, probe, sum_of_losses, seed=subject.seed)
        for name, probe in subject.sources.items()
    }


def _spectra(subject: Subject) -> Measured:
    factors = _factors(subject)
    numbers: dict[str, Any] = {}
    for source, layers in factors.items():
        numbers[source] = {}
        for layer, (a, g) in layers.items():
            values = kronecker_spectrum(a, g)
            at = plots.thinned(len(values))
            numbers[source][layer] = {"index": (at + 1).tolist(), "value": values[at].tolist()}
    shown = _some(list(factors[ORACLE]))
    return Measured(numbers, {"spectra": plots.plot_spectra(factors, layers=shown)})


def _alignment(history: History) -> Measured:
    numbers = {
        source: {
            str(step): {layer: asdict(row) for layer, row in layers.items()}
            for step, layers in steps.items()
        }
        for source, steps in history.items()
    }
    first = next(iter(next(iter(history.values())).values()))
    groups = {f"layer {name}": [name] for name in _some(list(first))}
    figures = {"alignment": plots.plot_alignment(history, groups=groups)}
    for factor in ("a", "g"):
        figures[f"alignment-{factor}"] = plots.plot_alignment(history, factor=factor, groups=groups)
    return Measured(numbers, figures)


def _gradients(subject: Subject) -> dict[str, ClippedGradients]:
    """Return what private records leave after the clip: as they are, and by each source's K-FAC."""
    train = subject.data.train
    generator = torch.Generator().manual_seed(subject.seed)
    chosen = torch.randperm(len(train), generator=generator)[:_RECORDS]
    batches = [((train.x[at],), train.y[at]) for at in chosen.split(_BATCH)]
    model, clip = subject.model, subject.options.clip
    # As the run has it; by default where the run has none.
    own = METHODS[subject.options.method].curvature is Kfac
    arguments = curvature_arguments(asdict(subject.options)) if own else {}
    found = {
        _method(source): clipped_gradients(
            model,
            batches,
            sum_of_losses,
            max_norm=clip,
            preconditioner=Kfac(model, probe, sum_of_losses, seed=subject.seed, **arguments),
        )
        for source, probe in subject.sources.items()
    }
    # The last, so that sources have the colours that they have elsewhere.
    found["dp-sgd"] = clipped_gradients(model, batches, sum_of_losses, max_norm=clip)
    return found


def _signal_to_noise(subject: Subject, gradients: Mapping[str, ClippedGradients]) -> Measured:
    options = subject.options
    std = subject.noise_multiplier * options.clip / options.batch_size
    ratios = {method: signal_to_noise(x.means, std) for method, x in gradients.items()}
    figure = plots.plot_signal_to_noise(ratios, reference=_method(ORACLE))
    return Measured({"noise_std": std, "ratios": ratios}, {"snr": figure})


def _clipping(subject: Subject, gradients: Mapping[str, ClippedGradients]) -> Measured:
    clip = subject.options.clip
    norms = {method: total_norms(x.sample_norms) for method, x in gradients.items()}
    at = torch.tensor(_QUANTILES, dtype=torch.float64)
    numbers = {
        method: {
            "clipped_fraction": clipped_fraction(gradients[method].sample_norms, clip),
            "norm_quantiles": dict(
                zip(map(str, _QUANTILES), norms[method].quantile(at).tolist(), strict=True)
            ),
        }
        for method in gradients
    }
    figure = plots.plot_clipping(norms, clip, reference=_method(ORACLE))
    return Measured({"clip": clip, "methods": numbers}, {"clipping": figure})


def _hessian(subject: Subject) -> Measured:
    generator = torch.Generator().manual_seed(subject.seed)
    spectra = {}
    for source, probe in subject.sources.items():
        inputs, targets = probe.batch(_BATCH, generator)
        spectra[source] = hessian_spectrum(
            subject.model, sum_of_losses, inputs, targets, seed=subject.seed, **_HESSIAN
        )
    numbers = {
        source: {"nodes": x.nodes.tolist(), "weights": x.weights.tolist(), "size": x.size}
        for source, x in spectra.items()
    }
    return Measured(numbers, {"hessian": plots.plot_hessian(spectra)})


def _method(source: str) -> str:
    return f"dp-kfc, {source}"


def _some(layers: Sequence[str]) -> list[str]:
    """Return the layers that are shown: from the first to the last, evenly."""
    if len(layers) <= _PANELS:
        return list(layers)
    return [layers[round(n * (len(layers) - 1) / (_PANELS - 1))] for n in range(_PANELS)]


def _plain(content: Any) -> Any:
    """Return what JSON can hold: None for numbers that are not finite."""
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
