"""A training as its options ask for it, before its first step."""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkernels.engine.private import PrivateTraining, make_private
from dpkernels.engine.sides import Preconditioner
from dpkernels.ops.noise import UNREACHABLE_MASS, NoiseKey
from dpkernels.postprocess import DiSK, DPAdamBC
from dpkernels.privacy.calibration import calibrate_noise_multiplier
from dpkernels.privacy.samplers import PoissonSampler
from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun
from dpkernels.train.data import Data, held_out, load
from dpkernels.train.methods import METHODS, SPECIFIC, Setting, make_optimizer
from dpkernels.train.models import TOKEN_MODELS, build
from dpkernels.train.options import Options
from dpkernels.train.text import FEATURES

# What a method that is not private clips to: nothing is as long.
_NO_CLIP = 1e30


@dataclass(frozen=True)
class Prepared:
    """Everything that a loop needs.

    steps: how many there are to be, which the noise is calibrated for.
    seconds: what the first estimate of curvature took.
    """

    data: Data
    model: nn.Module
    optimizer: Optimizer
    preconditioner: Preconditioner | None
    training: PrivateTraining
    loader: PrivateLoader
    run: PrivateRun
    steps: int
    seconds: float


def prepare(options: Options) -> Prepared:
    """Load the data, build the model, calibrate the noise, estimate curvature.

    Raises ValueError for options that do not fit the data.
    """
    method = METHODS[options.method]
    data = data_of(options)
    _check_fits(options, data)
    if options.seed is None:
        torch.seed()
    else:
        torch.manual_seed(options.seed)
    model = build(options.model, data.shape, data.classes)

    loader = loader_of(options, data, options.seed)
    steps = options.epochs * len(loader)
    if method.not_private is None:
        clip = options.clip
        sigma = calibrate_noise_multiplier(
            options.epsilon,
            options.delta,
            steps,
            loader.sampling,
            accountant=options.accountant,
            unreachable=unreachable_of(model),
        )
    else:
        clip, sigma = _NO_CLIP, 0.0

    setting = setting_of(options, model, data)
    # Before the clock starts: the first optimizer of a process makes torch import 2 s of modules.
    filtered = options.filter is not None
    optimizer = make_optimizer(method, options.optimizer, setting, filtered=filtered)
    begun = time.perf_counter()
    preconditioner = method.preconditioner(setting)
    with warnings.catch_warnings():
        if method.not_private is not None:  # the report says it, too
            warnings.filterwarnings("ignore", message=".*adds no noise", category=UserWarning)
        training = make_private(
            model,
            optimizer,
            noise_multiplier=sigma,
            max_grad_norm=clip,
            expected_batch_size=loader.expected_batch_size,
            loss_reduction="sum",
            preconditioner=preconditioner,
            noise_key=None if options.seed is None else NoiseKey.from_seed(options.seed),
        )
    seconds = time.perf_counter() - begun
    if isinstance(optimizer, DPAdamBC | DiSK):
        optimizer.follow(training)
    run = PrivateRun(training, loader, accountant=options.accountant, void=method.not_private)
    return Prepared(data, model, optimizer, preconditioner, training, loader, run, steps, seconds)


def unreachable_of(model: nn.Module) -> float:
    """Return ``PrivateTraining.unreachable_mass`` of a model all of which one process trains."""
    return (1 + sum(p.numel() for p in model.parameters())) * UNREACHABLE_MASS


def data_of(options: Options) -> Data:
    """Return the data set, as the model takes it, with what is held out as its test part."""
    data = load(
        options.dataset,
        options.data_dir,
        tokens=options.model in TOKEN_MODELS,
        features=options.features or FEATURES,
    )
    return data if options.validation is None else held_out(data, options.validation)


def loader_of(options: Options, data: Data, seed: int | None) -> PrivateLoader:
    """Return the loader of the training part, Poisson-sampled."""
    records = len(data.train)
    return PrivateLoader(
        data.train,
        PoissonSampler(records, options.batch_size / records, seed=seed),
        max_physical_batch_size=options.physical_batch_size,
        collate_fn=as_fetched,
    )


def setting_of(options: Options, model: nn.Module, data: Data) -> Setting:
    """Return what the method is made for."""
    given = {name: getattr(options, name) for name in SPECIFIC}
    return Setting(model, data, options.data_dir, options.lr, options.seed or 0, given)


def _check_fits(options: Options, data: Data) -> None:
    records = len(data.train)
    if options.batch_size > records:
        raise ValueError(
            f"batch_size must be at most the number of records, {records}, got {options.batch_size}"
        )
    if options.delta >= 1 / records:
        raise ValueError(
            f"delta must be less than 1 / the number of records, {1 / records:.2g}, got "
            f"{options.delta:g}: with more, publishing whole records would be allowed"
        )
    if options.power is not None and data.kind != "image":
        raise ValueError(
            f"power: it is the spectrum of noise for images, and {data.name} has none, got "
            f"{options.power:g}; leave --power out"
        )


def as_fetched(batch: Any) -> tuple[Tensor, Tensor]:
    """Return a batch as the data set has fetched it, whole."""
    x, y = batch
    return x, y


def at_iterate(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return where the model has its iterate: DiSK leaves parameters at another point."""
    return optimizer.at_iterate() if isinstance(optimizer, DiSK) else nullcontext()
