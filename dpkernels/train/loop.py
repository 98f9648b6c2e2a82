"""Private training from data to report, top to bottom."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from tqdm import tqdm

from dpkernels.engine.private import make_private
from dpkernels.ops.noise import NoiseKey
from dpkernels.postprocess import DiSK, DPAdamBC
from dpkernels.privacy.calibration import calibrate_noise_multiplier
from dpkernels.privacy.mechanism import NotPrivate
from dpkernels.privacy.samplers import PoissonSampler
from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun
from dpkernels.train.data import Records, load
from dpkernels.train.interrupts import Interrupts
from dpkernels.train.methods import METHODS, Setting, describe, make_optimizer
from dpkernels.train.models import build
from dpkernels.train.options import Options
from dpkernels.train.outputs import CHECKPOINT, MODEL, Epoch, Outcome

# An estimate is 8 passes over 256 probes, more than an epoch of a small data set.
_LEAST_REFRESH = 50
# What a method that is not private clips to: nothing is as long.
_NO_CLIP = 1e30


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
    Raises ValueError for options that do not fit the data.
    """
    method = METHODS[options.method]
    data = load(options.dataset, options.data_dir)
    _check_fits(options, len(data.train))
    if options.seed is None:
        torch.seed()
    else:
        torch.manual_seed(options.seed)
    model = build(options.model, data.shape, data.classes)

    sampler = PoissonSampler(
        len(data.train), options.batch_size / len(data.train), seed=options.seed
    )
    loader = PrivateLoader(
        data.train,
        sampler,
        max_physical_batch_size=options.physical_batch_size,
        collate_fn=_as_fetched,
    )
    steps = options.epochs * len(loader)
    if method.not_private is None:
        clip = options.clip
        sigma = calibrate_noise_multiplier(
            options.epsilon, options.delta, steps, sampler.sampling, accountant=options.accountant
        )
    else:
        clip, sigma = _NO_CLIP, 0.0

    setting = Setting(
        model,
        data,
        options.data_dir,
        lr=options.lr,
        refresh_every=options.refresh_every or max(len(loader), _LEAST_REFRESH),
        seed=options.seed or 0,
    )
    preconditioner = method.preconditioner(setting) if method.preconditioner else None
    optimizer = make_optimizer(method, options.optimizer, setting)
    with warnings.catch_warnings():
        if method.not_private is not None:  # the report says it, too
            warnings.filterwarnings("ignore", message=".*adds no noise", category=UserWarning)
        training = make_private(
            model,
            optimizer,
            noise_multiplier=sigma,
            max_grad_norm=clip,
            expected_batch_size=sampler.expected_batch_size,
            loss_reduction="sum",
            preconditioner=preconditioner,
            noise_key=None if options.seed is None else NoiseKey.from_seed(options.seed),
        )
    if isinstance(optimizer, DPAdamBC | DiSK):
        optimizer.follow(training)
    run = PrivateRun(training, loader, accountant=options.accountant, void=method.not_private)

    epochs: list[Epoch] = []
    seconds = 0.0  # of training, without evaluation, over all restarts
    checkpoint = output / CHECKPOINT
    if resume:
        extra = run.load(checkpoint)
        epochs, seconds = [Epoch(**row) for row in extra["epochs"]], extra["seconds"]
    else:
        options.write(output)

    def save() -> None:
        rows = [epoch.to_dict() for epoch in epochs]
        run.save(checkpoint, extra={"epochs": rows, "seconds": seconds})

    if not resume:
        save()
    bar = tqdm(total=steps, initial=training.steps, unit="step", disable=not progress)
    with bar, Interrupts() as interrupts:
        while training.steps < steps or len(epochs) < options.epochs:
            losses, begun, first = 0.0, time.perf_counter(), training.steps
            for x, y in loader:
                loss = cross_entropy(model(x), y, reduction="sum")
                loss.backward()
                losses += loss.item()
                if not loader.is_last_microbatch:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                # By the expected size: that of the batch depends on who was drawn.
                mean_loss = losses / (training.steps - first) / options.batch_size
                speed = _speed(options, training.steps, seconds + time.perf_counter() - begun)
                spent = _epsilon(run, options, within=0.02)
                accuracy = epochs[-1].accuracy if epochs else None
                bar.set_postfix(_shown(mean_loss, accuracy, spent, speed), refresh=False)
                bar.update()
                if interrupts.asked and training.steps < steps:
                    seconds += time.perf_counter() - begun
                    save()
                    raise KeyboardInterrupt
            seconds += time.perf_counter() - begun
            with _at_iterate(optimizer):
                accuracy = evaluate(model, data.test)
            taken = training.steps - first
            epochs.append(
                Epoch(
                    len(epochs) + 1,
                    training.steps,
                    losses / taken / options.batch_size if taken else None,
                    accuracy,
                    _epsilon(run, options),
                    _speed(options, training.steps, seconds),
                )
            )
            save()

    report = run.report(options.delta)
    with _at_iterate(optimizer):
        torch.save(model.state_dict(), output / MODEL)
    outcome = Outcome(options, data.note, tuple(epochs), report, describe(preconditioner))
    outcome.write(output)
    return outcome


def evaluate(model: nn.Module, test: Records, batch_size: int = 1000) -> float:
    """Return the share of ``test`` that the model gets right, in evaluation mode."""
    training, right = model.training, 0
    model.eval()
    with torch.no_grad():
        for x, y in zip(test.x.split(batch_size), test.y.split(batch_size), strict=True):
            right += int((model(x).argmax(1) == y).sum())
    model.train(training)
    return right / len(test)


def _check_fits(options: Options, records: int) -> None:
    if options.batch_size > records:
        raise ValueError(
            f"batch_size must be at most the number of records, {records}, got {options.batch_size}"
        )
    if options.delta >= 1 / records:
        raise ValueError(
            f"delta must be less than 1 / the number of records, {1 / records:.2g}, got "
            f"{options.delta:g}: with more, publishing whole records would be allowed"
        )


def _as_fetched(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def _at_iterate(optimizer: Optimizer) -> Any:
    """Return where to evaluate: DiSK leaves parameters at another point than its model's."""
    return optimizer.at_iterate() if hasattr(optimizer, "at_iterate") else nullcontext()


def _epsilon(run: PrivateRun, options: Options, within: float = 0.0) -> float | None:
    """Return what was spent, None if there is no guarantee.

    Noise was calibrated for all steps, so what a rough answer has beyond the budget is not spent.
    """
    try:
        return min(run.accountant.epsilon(options.delta, within=within), options.epsilon)
    except NotPrivate:
        return None


def _speed(options: Options, steps: int, seconds: float) -> float:
    return options.batch_size * steps / max(seconds, 1e-9)


def _shown(
    loss: float, accuracy: float | None, epsilon: float | None, speed: float
) -> dict[str, str]:
    return {
        "loss": f"{loss:.3f}",
        "accuracy": "-" if accuracy is None else f"{accuracy:.1%}",
        "epsilon": "none" if epsilon is None else f"{epsilon:.3f}",
        "samples/s": f"{speed:,.0f}",
    }
