"""The same training by Opacus' DP-SGD, as its authors would write it, for the clock."""

from __future__ import annotations

import importlib
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkernels.train.loop import evaluate
from dpkernels.train.methods import METHODS, Setting, make_optimizer
from dpkernels.train.models import build
from dpkernels.train.options import Options
from dpkernels.train.prepared import as_fetched, data_of

MODES = ("hooks", "ghost")


def require_opacus() -> None:
    """Import Opacus, so that its import is on no clock.

    Raises RuntimeError without it; the ``peers`` extra has it.
    """
    try:
        importlib.import_module("opacus")
    except ImportError:
        raise RuntimeError(
            "timing: Opacus is not installed; pip install 'dpkernels[peers]'"
        ) from None


def train_with_opacus(options: Options, mode: str) -> dict[str, Any]:
    """Train by Opacus' DP-SGD within the budget of ``options``; return a report as ours has it.

    Model, data, optimizer and batches' expected size are those of ``dpkernels train``, and batches
    are fetched as fast. Samples are drawn by Opacus' Poisson loader; noise is calibrated by it.

    mode: ``hooks`` stores per-sample gradients, ``ghost`` clips by norms alone.
    """
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    data = data_of(options)
    torch.manual_seed(options.seed or 0)
    model = build(options.model, data.shape, data.classes)
    if not ModuleValidator.is_valid(model):  # it trains an attention of its own only
        model = ModuleValidator.fix(model)
    setting = Setting(model, data, options.data_dir, options.lr, seed=0)
    optimizer = make_optimizer(METHODS["dp-sgd"], options.optimizer, setting)
    arguments: dict[str, Any] = {
        "module": model,
        "optimizer": optimizer,
        "criterion": nn.CrossEntropyLoss(),
        "data_loader": DataLoader(data.train, batch_size=options.batch_size, collate_fn=as_fetched),
        "target_epsilon": options.epsilon,
        "target_delta": options.delta,
        "epochs": options.epochs,
        "max_grad_norm": options.clip,
        "grad_sample_mode": mode,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks, and of its generator, meant for cryptographers
        engine = PrivacyEngine(accountant="rdp")
        made = engine.make_private_with_epsilon(**arguments)
        # With ghost clipping, the criterion is wrapped, too.
        private, noisy, *wrapped, loader = made
        criterion = wrapped[0] if wrapped else arguments["criterion"]
        seconds, steps = 0.0, 0
        for _ in range(options.epochs):
            begun = time.perf_counter()
            for x, y in loader:
                noisy.zero_grad()
                criterion(private(x), y).backward()
                noisy.step()
                steps += 1
            seconds += time.perf_counter() - begun
            accuracy = evaluate(private, data.test)
    return {
        "data": data.note,
        "accuracy": accuracy,
        # Its rate is 1 / steps of an epoch, so that an epoch draws all records on average.
        "samples_per_second": options.epochs * len(data.train) / max(seconds, 1e-9),
        "privacy": {"epsilon": engine.get_epsilon(options.delta), "steps": steps},
    }
