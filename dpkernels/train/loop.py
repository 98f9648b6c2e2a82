"""Private training from options to report, top to bottom."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from dpkernels.privacy.mechanism import NotPrivate
from dpkernels.run.checkpoint import write_atomically
from dpkernels.train.average import Average
from dpkernels.train.data import Records
from dpkernels.train.interrupts import Interrupts
from dpkernels.train.methods import describe
from dpkernels.train.options import FILE, Options
from dpkernels.train.outputs import CHECKPOINT, MODEL, Epoch, Outcome, write_metrics
from dpkernels.train.prepared import Prepared, at_iterate, prepare
from dpkernels.train.schedule import set_learning_rate


def train(
    options: Options, output: Path, *, resume: bool = False, progress: bool = True
) -> Outcome:
    """Train as ``options`` say, within their budget; write everything to ``output``.

    Unit: one record, added or removed. Seen: all models. Sensitivity: ``clip``. Noise: Gaussian,
    once a step, calibrated so that all epochs together stay within (epsilon, delta). Sampling:
    Poisson. Training losses, on the bar and in ``metrics.csv``, depend on the data: epsilon does
    not cover them.

    resume: go on from the checkpoint in ``output``. progress: show a bar.

    Raises KeyboardInterrupt, with a checkpoint of the last step written, if Ctrl-C was pressed.
    Errors before the first step leave neither checkpoint nor options.
    Raises ValueError for options that do not fit the data.
    """
    checkpoint = output / CHECKPOINT
    if resume and not checkpoint.exists():
        raise FileNotFoundError(
            f"output: {checkpoint} is not there: the run was stopped before its first step; leave "
            "--resume out to begin"
        )
    ready = prepare(options)
    state = _State(options, ready, checkpoint)
    if resume:
        state.load()
        return _train(options, ready, state, output, progress)
    try:
        options.write(output)
        state.save()
        return _train(options, ready, state, output, progress)
    except Exception:
        if ready.training.steps == 0:
            # Nothing was released: the folder must not seem to hold a run.
            for name in (CHECKPOINT, FILE):
                (output / name).unlink(missing_ok=True)
        raise


def _train(
    options: Options, ready: Prepared, state: _State, output: Path, progress: bool
) -> Outcome:
    """Train what is left of the epochs, and write what comes of them."""
    taken = ready.training.steps
    bar = tqdm(total=ready.steps, initial=taken, unit="step", disable=not progress)
    with bar, Interrupts() as interrupts:
        while len(state.epochs) < options.epochs:
            loss, to_its_end = _train_epoch(options, ready, state, bar, interrupts)
            if not to_its_end:
                state.save()
                raise KeyboardInterrupt
            with state.released():
                accuracy = evaluate(ready.model, ready.data.test)
            state.epochs.append(
                Epoch(
                    len(state.epochs) + 1,
                    ready.training.steps,
                    loss,
                    accuracy,
                    _epsilon(ready, options),
                    state.speed(),
                )
            )
            state.save()
            write_metrics(output, options, state.epochs)
            if interrupts.asked and len(state.epochs) < options.epochs:
                raise KeyboardInterrupt

    with state.released():
        write_atomically(output / MODEL, ready.model.state_dict())
    outcome = Outcome(
        options,
        ready.data.note,
        tuple(state.epochs),
        state.seconds,
        ready.run.report(options.delta),
        describe(ready.preconditioner),
    )
    outcome.write(output)
    return outcome


class _State:
    """What a checkpoint keeps beside the run: rows of the table, the clock, the average.

    seconds: of training, without evaluation, over all restarts.
    """

    def __init__(self, options: Options, ready: Prepared, checkpoint: Path) -> None:
        self._options, self._ready, self._checkpoint = options, ready, checkpoint
        self.epochs: list[Epoch] = []
        self.seconds = ready.seconds
        self._average = None
        if options.average is not None:
            self._average = Average(ready.model, options.average)

    def save(self) -> None:
        extra = {
            "epochs": [epoch.to_dict() for epoch in self.epochs],
            "seconds": self.seconds,
            "average": self._average and self._average.state_dict(),
        }
        self._ready.run.save(self._checkpoint, extra=extra)

    def load(self) -> None:
        extra = self._ready.run.load(self._checkpoint)
        self.epochs = [Epoch(**row) for row in extra["epochs"]]
        self.seconds = extra["seconds"]
        if self._average is not None:
            self._average.load_state_dict(extra["average"])

    def after_step(self) -> None:
        """Take the parameters into the average, if there is one."""
        if self._average is not None:
            with at_iterate(self._ready.optimizer):
                self._average.update()

    def released(self) -> AbstractContextManager[None]:
        """Return where the model has the parameters that are evaluated and saved."""
        if self._average is not None:
            return self._average.in_the_model()
        return at_iterate(self._ready.optimizer)

    def speed(self, running: float = 0.0) -> float:
        """Return samples per second, as expected; running: seconds that are not yet counted."""
        samples = self._options.batch_size * self._ready.training.steps
        return samples / max(self.seconds + running, 1e-9)


def _train_epoch(
    options: Options, ready: Prepared, state: _State, bar: Any, interrupts: Interrupts
) -> tuple[float | None, bool]:
    """Train to the end of the epoch, or to the step in which Ctrl-C was pressed.

    Returns the mean loss of its steps here, None if there were none, and whether it is at its end.
    """
    model, optimizer, training, loader = ready.model, ready.optimizer, ready.training, ready.loader
    losses, first, begun = 0.0, training.steps, time.perf_counter()
    shown, to_its_end = begun, True

    def mean_loss() -> float | None:
        # By the expected size: that of the batch depends on who was drawn.
        samples = (training.steps - first) * options.batch_size
        return losses / samples if samples else None

    for x, y in loader:
        loss = cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        losses += loss.item()
        if not loader.is_last_microbatch:
            continue
        set_learning_rate(optimizer, options.lr, options.schedule, training.steps, ready.steps)
        optimizer.step()
        optimizer.zero_grad()
        state.after_step()
        now = time.perf_counter()
        # Epsilon takes longer than a step of a small model: only when it is drawn.
        if not bar.disable and now - shown >= bar.mininterval:
            shown = now
            spent = _epsilon(ready, options, within=0.02)
            accuracy = state.epochs[-1].accuracy if state.epochs else None
            speed = state.speed(now - begun)
            held_out = options.validation is not None
            figures = _shown(mean_loss(), accuracy, spent, speed, held_out=held_out)
            bar.set_postfix(figures, refresh=False)
        bar.update()
        if interrupts.asked and training.steps < ready.steps:
            to_its_end = False
            break
    state.seconds += time.perf_counter() - begun
    return mean_loss(), to_its_end


def evaluate(model: nn.Module, test: Records, batch_size: int = 1000) -> float:
    """Return the share of ``test`` that the model gets right, in evaluation mode."""
    training, right = model.training, 0
    model.eval()
    with torch.no_grad():
        for x, y in zip(test.x.split(batch_size), test.y.split(batch_size), strict=True):
            right += int((model(x).argmax(1) == y).sum())
    model.train(training)
    return right / len(test)


def _epsilon(ready: Prepared, options: Options, within: float = 0.0) -> float | None:
    """Return what was spent, None if there is no guarantee.

    within: how far, relatively, the answer may be above. Noise was calibrated for all steps, so
    what such a one has beyond the budget is not spent.
    """
    try:
        spent = ready.run.accountant.epsilon(options.delta, within=within)
    except NotPrivate:
        return None
    return min(spent, options.epsilon) if within else spent


def _shown(
    loss: float | None,
    accuracy: float | None,
    epsilon: float | None,
    speed: float,
    *,
    held_out: bool,
) -> dict[str, str]:
    measured = "accuracy (not private)" if held_out else "accuracy"
    return {
        "loss (not private)": "-" if loss is None else f"{loss:.3f}",
        measured: "-" if accuracy is None else f"{accuracy:.1%}",
        "epsilon": "none" if epsilon is None else f"{epsilon:.3f}",
        "samples/s": f"{speed:,.0f}",
    }
