"""Epsilon over the steps of a run: as numbers, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpkernels.privacy.accountants import make_accountant
from dpkernels.privacy.accountants.accountant import check_steps
from dpkernels.privacy.mechanism import Shuffled, Statement
from dpkernels.whole_file import whole_file

# Told apart without colours too.
_STYLES = {"gaussian": "-.", "pld": "-", "rdp": "--"}
_COLOURS = {"gaussian": "#1a7f5a", "pld": "#1f4e9c", "rdp": "#c2571a"}


@dataclass(frozen=True)
class Curve:
    """Epsilon at ``delta`` after each of ``steps``, by each accountant.

    stairs: whether it stays the same from one of ``steps`` (not included) to the next.
    """

    delta: float
    steps: tuple[int, ...]
    epsilons: dict[str, tuple[float, ...]]
    stairs: bool = False


def epsilon_curve(
    statement: Statement, steps: int, delta: float, accountants: Sequence[str], points: int = 40
) -> Curve:
    """Return epsilon from the first step to the last, at ``points`` step counts or fewer.

    They lie closer together at the beginning, where epsilon grows fastest. Of shuffled steps they
    are the ends of epochs.
    """
    check_steps(steps, 1)
    counts = sorted({max(1, round(steps * (k / points) ** 2)) for k in range(1, points + 1)})
    if stairs := isinstance(statement.sampling, Shuffled):
        size = statement.sampling.batches
        counts = sorted({min(steps, -(-count // size) * size) for count in counts})
    epsilons: dict[str, tuple[float, ...]] = {}
    for name in accountants:
        accountant, values = make_accountant(name), []
        for before, count in zip([0, *counts], counts, strict=False):
            accountant.compose(statement, count - before)
            values.append(accountant.epsilon(delta))
        epsilons[name] = tuple(values)
    return Curve(delta, tuple(counts), epsilons, stairs)


def require_matplotlib() -> None:
    """Raise RuntimeError if plots cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            "a plot needs matplotlib; install it with: pip install 'dpkernels[plots]'"
        ) from error


def plot(curve: Curve, title: str, file: str | Path, target: float | None = None) -> None:
    """Draw ``curve``, one line for each accountant, and the epsilon aimed at, into ``file``.

    Raises RuntimeError without matplotlib, which the ``plots`` extra has.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, values in curve.epsilons.items():
        steps, heights = list(curve.steps), list(values)
        if curve.stairs:
            steps, heights = [0, *steps], [values[0], *heights]
        axes.plot(
            steps,
            heights,
            _STYLES[name],
            color=_COLOURS[name],
            drawstyle="steps-pre" if curve.stairs else "default",
            lw=1.8,
            label=f"{name}: {values[-1]:.3f}",
        )
    if target is not None:
        axes.axhline(target, color="#888888", lw=1, ls=":", label=f"target: {target:g}")
    axes.set_xlim(0, curve.steps[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("steps")
    axes.set_ylabel(f"epsilon at delta = {curve.delta:g}")
    axes.set_title(title, fontsize=11, loc="left", pad=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    title = "accountant: after the last step"
    axes.legend(frameon=False, loc="lower right", alignment="left", title=title)
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=150, format=Path(file).suffix[1:])
