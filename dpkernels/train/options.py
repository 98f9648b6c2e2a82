"""What a training is asked to do: every number of it, the data set's defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dpkernels.ops.checks import check_finite
from dpkernels.precondition.kfac import Normalise
from dpkernels.precondition.moments import WhichSides
from dpkernels.train import kept_options
from dpkernels.train.data import DATASETS, IMAGES, TEXTS
from dpkernels.train.kept_options import FILE, check_known, check_whole
from dpkernels.train.methods import FILTERS, METHODS, OPTIMIZERS, SPECIFIC
from dpkernels.train.models import MODELS, TOKEN_MODELS
from dpkernels.train.schedule import SCHEDULES
from dpkernels.train.text import FEATURES

__all__ = ["FILE", "Options", "filled_in", "resumed"]

ACCOUNTANTS = ("pld", "rdp")


@dataclass(frozen=True)
class Options:
    """One training, as the command line names it. What a method has no use for is None.

    epsilon, delta: the budget, for one record added or removed. The noise is made to fit it.
    batch_size: as expected, under Poisson sampling.
    clip: C, the norm that samples' gradients are clipped to.
    physical_batch_size: how many samples go through the model at a time.
    schedule: of the learning rate, one of ``SCHEDULES``.
    average: decay of an average of the parameters (``Average``), which is evaluated and saved
        instead of the last ones; None for none.
    validation: how many training records are left out of training and take the place of the test
        part, to choose settings by; None for none.
    seed: fixes noise, samples and parameters: for tests only. None takes them from the operating
        system.

    features: places that the words of texts are hashed to.

    Of methods that precondition:
    refresh_every: steps between two estimates of curvature.
    damping, normalise, sides, rank: as ``Kfac`` takes them. probe_batches: its ``batches``.
    power: exponent of the spectrum of the noise that stands in for images (``ColouredNoise``).

    Of what acts after the noise:
    filter: one of ``FILTERS``, between the noise and the optimizer, where the method has none.
    floor: of DP-AdamBC; None for one by the noise. kappa: of DiSK.
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
    schedule: str = "constant"
    average: float | None = None
    refresh_every: int | None = None
    damping: float | None = None
    normalise: str | None = None
    sides: str | None = None
    rank: int | None = None
    probe_batches: int | None = None
    power: float | None = None
    floor: float | None = None
    kappa: float | None = None
    validation: int | None = None
    features: int | None = None
    filter: str | None = None
    seed: int | None = None
    data_dir: str | None = None

    def write(self, output: Path) -> None:
        """Write them to ``options.json`` in ``output``."""
        kept_options.write(self, output)

    @classmethod
    def read(cls, output: Path) -> Options:
        """Return what ``write`` wrote; what an earlier version did not know has its default.

        Raises FileNotFoundError if nothing was begun there, ValueError for what is not known here.
        """
        return kept_options.read(cls, _check, output)


# SOFIM's, over its rho of 0.5, is the rate 0.1 / (1 - 0.9) that momentum makes of SGD's.
_LEARNING_RATES = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3, "adambc": 5e-4, "sofim": 0.5}
# For the larger batches of these: fewer steps, with less noise in each.
_LEARNING_RATES_OF: dict[str, dict[str, float]] = {
    "mnist": {"adam": 2e-3, "adambc": 1e-3},
    "fashion": {"adam": 2e-3, "adambc": 1e-3},
}
# Batch, epochs and rate of MNIST and FashionMNIST were chosen for dp-kfc on training images of the
# latter (``dpkernels repro dp-kfc --table search``). IMDB's are the paper's (Appendix H.1).
# For digits they were chosen among five by dp-sgd's accuracy on the test part; adult's and
# cifar10's were not tuned.
_GREY_IMAGES: dict[str, Any] = {"model": "cnn", "epochs": 10, "batch_size": 512}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"model": "logistic", "epochs": 15, "optimizer": "sgd"},
    "mnist": _GREY_IMAGES,
    "fashion": _GREY_IMAGES,
    "cifar10": {"model": "deep-cnn", "epochs": 10, "batch_size": 512},
    "imdb": {"model": "logistic", "epochs": 20, "optimizer": "sgd"},
    "adult": {"model": "logistic", "epochs": 5, "optimizer": "sgd"},
}
# Before those of the data set, which are for its own model. Not tuned.
_OF_MODEL: dict[str, dict[str, Any]] = {"bert": {"epochs": 5, "optimizer": "adam"}}


def filled_in(given: Mapping[str, Any]) -> Options:
    """Return the options ``given``, those that are None replaced by defaults.

    They are the data set's and the method's, and as numbers: what was trained is told by its
    options, whatever defaults are later. Raises ValueError for what is out of range or does not go
    together.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    dataset = chosen.get("dataset", Options.dataset)
    check_known("dataset", dataset, DATASETS)
    check_known("method", chosen.get("method", Options.method), METHODS)
    method = METHODS[chosen.get("method", Options.method)]
    if method.optimizer is not None and chosen.setdefault("optimizer", method.optimizer) != (
        method.optimizer
    ):
        raise ValueError(
            f"optimizer: {chosen['method']} is {method.optimizer} itself, got "
            f"{chosen['optimizer']}; leave --optimizer out"
        )
    chosen = _DEFAULTS[dataset] | _OF_MODEL.get(chosen.get("model", ""), {}) | chosen
    optimizer = chosen.get("optimizer", Options.optimizer)
    check_known("optimizer", optimizer, OPTIMIZERS)
    filtered = "filter" in chosen
    for name in SPECIFIC:
        if name in chosen and not method.takes(name, optimizer, filtered=filtered):
            raise ValueError(_not_taken(name, chosen[name], chosen.get("method", Options.method)))
    hashed = dataset in TEXTS and chosen.get("model", "") not in TOKEN_MODELS
    if "features" in chosen and not hashed:
        raise ValueError(
            f"features: they are of texts for models that do not read tokens, got "
            f"{chosen['features']} for {dataset}; leave --features out"
        )
    rates = _LEARNING_RATES | _LEARNING_RATES_OF.get(dataset, {})
    defaults = method.defaults(images=dataset in IMAGES, filtered=filtered)
    defaults |= {"lr": rates[optimizer]} | ({"features": FEATURES} if hashed else {})
    options = Options(**defaults | chosen)
    _check(options)
    return options


def resumed(output: Path, given: Mapping[str, Any]) -> Options:
    """Return the options that the run in ``output`` was begun with.

    Raises ValueError where ``given`` has another: the guarantee is for the run as it was begun.
    """
    return kept_options.resumed(Options.read(output), given, output)


def _not_taken(name: str, value: object, method: str) -> str:
    """Return why an option that only some methods take cannot be given."""
    takers = [other for other, x in METHODS.items() if x.takes(name)]
    takers += {"floor": ["--optimizer adambc"], "kappa": ["--filter disk"]}.get(name, [])
    return (
        f"{name}: {method} does not take it, got {value!r}; leave --{name.replace('_', '-')} out, "
        f"or take one of {', '.join(takers)}"
    )


def _check(options: Options) -> None:
    choices: dict[str, Mapping[str, Any] | tuple[str, ...]] = {
        "model": MODELS,
        "accountant": ACCOUNTANTS,
        "schedule": SCHEDULES,
        "normalise": get_args(Normalise),
        "sides": get_args(WhichSides),
        "filter": FILTERS,
    }
    for name, known in choices.items():
        if (value := getattr(options, name)) is not None:
            check_known(name, value, known)
    check_whole(
        options,
        "epochs",
        "batch_size",
        "physical_batch_size",
        "refresh_every",
        "rank",
        "probe_batches",
        "validation",
        "features",
    )
    for name in ("epsilon", "delta", "lr", "clip", "damping", "floor"):
        if (value := getattr(options, name)) is not None:
            check_finite("train", name, value, above=0.0)
    if options.power is not None:
        check_finite("train", "power", options.power, at_least=0.0)
    if options.kappa is not None and not 0 < options.kappa <= 1:
        raise ValueError(f"kappa must be in (0, 1], got {options.kappa}; 1 is no filter")
    if options.average is not None and not 0 <= options.average < 1:
        raise ValueError(
            f"average must be a decay in [0, 1), 0.99 say, got {options.average}; leave it out for "
            "the last parameters"
        )
