"""What is diagnosed: a model with its data and noise, new or from a finished training."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpkernels.engine.private import make_private
from dpkernels.ops.noise import NoiseKey
from dpkernels.postprocess import DiSK, DPAdamBC
from dpkernels.precondition.probes import ColouredNoise, PrivateData, Probe, PublicData
from dpkernels.privacy.calibration import calibrate_noise_multiplier
from dpkernels.train.data import Data
from dpkernels.train.methods import (
    METHODS,
    make_optimizer,
    public_inputs,
    sum_of_losses,
    synthetic_probe,
)
from dpkernels.train.models import build
from dpkernels.train.options import Options, resumed
from dpkernels.train.outputs import MODEL, REPORT
from dpkernels.train.prepared import (
    at_iterate,
    data_of,
    loader_of,
    setting_of,
    unreachable_of,
)

_SEED = 0  # figures can be drawn again; nothing here is private anyway
_POINTS = 10  # of a history, beside the first


@dataclass(frozen=True)
class Subject:
    """A model, where its curvature may come from, and the noise of its training.

    sources: probes by name; ``oracle`` is the private data itself.
    noise_multiplier: that keeps the whole training, of ``options.epochs``, within its budget.
    steps: of training that the model had before. notes: for people.
    """

    options: Options
    data: Data
    model: nn.Module
    sources: Mapping[str, Probe]
    noise_multiplier: float
    steps: int
    notes: tuple[str, ...]

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""
        return _SEED if self.options.seed is None else self.options.seed


def new_subject(options: Options) -> Subject:
    """Return a model with fresh parameters."""
    return _subject(options, None)


def load_subject(folder: Path, given: Mapping[str, Any]) -> Subject:
    """Return the model of the finished training in ``folder``, whose options it has.

    Raises FileNotFoundError if it is not finished, ValueError where ``given`` has other options.
    """
    if not (folder / MODEL).exists() or not (folder / REPORT).exists():
        raise FileNotFoundError(
            f"checkpoint: {folder} has no {MODEL} and {REPORT}; name the --output of a dpkernels "
            "train that came to its end"
        )
    return _subject(resumed(folder, given), folder)


def _subject(options: Options, folder: Path | None) -> Subject:
    data = data_of(options)
    torch.manual_seed(_SEED if options.seed is None else options.seed)
    model, steps = build(options.model, data.shape, data.classes), 0
    if folder is not None:
        model.load_state_dict(torch.load(folder / MODEL, weights_only=True))
        steps = json.loads((folder / REPORT).read_text())["privacy"]["steps"]
    sources, notes = _sources(data, options)
    with _seeds_are_known():
        loader = loader_of(options, data, _SEED if options.seed is None else options.seed)
    sigma = calibrate_noise_multiplier(
        options.epsilon,
        options.delta,
        options.epochs * len(loader),
        loader.sampling,
        accountant=options.accountant,
        unreachable=unreachable_of(model),
    )
    return Subject(options, data, model, sources, sigma, steps, notes)


def train_steps(subject: Subject, steps: int, look: Callable[[int], None]) -> None:
    """Train the subject's model for so many steps, and call ``look(step)`` on the way.

    It is called before the first step, after the last, and about ten times between. As in
    ``dpkernels train``: the options' method, Poisson sampling, clip and noise. Raises ValueError
    for a method without clip and noise.
    """
    look(subject.steps)
    if steps == 0:
        return
    options, model, method = subject.options, subject.model, METHODS[subject.options.method]
    if method.not_private is not None:
        raise ValueError(
            f"method must be one with clip and noise, got {options.method}; pass a --checkpoint of "
            "dpkernels train"
        )
    setting = setting_of(options, model, subject.data)
    filtered = options.filter is not None
    optimizer = make_optimizer(method, options.optimizer, setting, filtered=filtered)
    with _seeds_are_known():
        loader = loader_of(options, subject.data, subject.seed)
        training = make_private(
            model,
            optimizer,
            noise_multiplier=subject.noise_multiplier,
            max_grad_norm=options.clip,
            expected_batch_size=options.batch_size,
            loss_reduction="sum",
            preconditioner=method.preconditioner(setting),
            noise_key=NoiseKey.from_seed(subject.seed),
        )
    if isinstance(optimizer, DPAdamBC | DiSK):
        optimizer.follow(training)
    while training.steps < steps:
        for x, y in loader:
            sum_of_losses(model(x), y).backward()
            if not loader.is_last_microbatch:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if training.steps == steps:
                break
            if training.steps % max(1, steps // _POINTS) == 0:
                with at_iterate(optimizer):
                    look(subject.steps + training.steps)
    training.detach()
    with at_iterate(optimizer):
        look(subject.steps + steps)
        final = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(final)


def _sources(data: Data, options: Options) -> tuple[dict[str, Probe], tuple[str, ...]]:
    """Return where curvature may come from, the run's own noise first, and what there is not."""
    synthetic = synthetic_probe(data, options.power)
    sources: dict[str, Probe] = {"oracle": PrivateData(data.train, not_private=True)}
    if isinstance(synthetic, ColouredNoise):
        paler = (ColouredNoise(data.shape, power, data.classes) for power in (1.0, 0.0))
        sources |= {f"{noise.colour} noise": noise for noise in (synthetic, *paler)}
    else:
        sources["synthetic"] = synthetic
    try:
        inputs, name = public_inputs(data, options.data_dir)
    except (ValueError, OSError) as error:
        return sources, (f"no public source: {error}",)
    sources[f"public, {name}"] = PublicData(inputs, classes=data.classes)
    return sources, ()


@contextmanager
def _seeds_are_known() -> Iterator[None]:
    """Leave out the warnings that fixed seeds protect nobody: the command says it of everything."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fixed seed", category=UserWarning)
        yield
