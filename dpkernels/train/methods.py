"""The methods that ``dpkernels train`` knows: what acts before the clip, and what after the noise.

A method is a preconditioner, an optimizer, and possibly a filter between noise and optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpkernels.postprocess import DiSK, DPAdamBC, Sofim
from dpkernels.precondition.adadps import AdaDPS
from dpkernels.precondition.kfac import Kfac
from dpkernels.precondition.probes import (
    ColouredNoise,
    Features,
    PrivateData,
    Probe,
    PublicData,
    Tokens,
)
from dpkernels.train.data import Data, load_public
from dpkernels.train.text import CLS, PAD, VOCABULARY

if TYPE_CHECKING:
    from dpkernels.engine.sides import Preconditioner

OPTIMIZERS = ("adam", "adamw", "sgd", "adambc", "sofim")
FILTERS = ("disk",)
# Options that are arguments of ``Kfac``, or of ``AdaDPS`` where it has them.
_CURVATURE = {
    "refresh_every": "refresh_every",
    "damping": "damping",
    "normalise": "normalise",
    "sides": "sides",
    "rank": "rank",
    "probe_batches": "batches",
}
# What only some methods take.
SPECIFIC = (*_CURVATURE, "power", "floor", "kappa")
# As in Appendix D of DP-KFC. On held-out images of FashionMNIST half a point better than once an
# epoch, and as good as every 20 steps.
_REFRESH_EVERY = 50


@dataclass(frozen=True)
class Setting:
    """What a method is made for.

    lr: the learning rate. seed: of the probes.
    given: of ``SPECIFIC``, by name; what is None or not there is left to the method.
    """

    model: nn.Module
    data: Data
    data_dir: str | None
    lr: float
    seed: int
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A row of the paper's tables.

    about: one line for people.
    curvature, probe: ``Kfac`` or ``AdaDPS``, and what it is estimated from; or None.
    optimizer: the one that the method is named for, None where the caller chooses.
    filtered: whether DiSK's filter stands before the optimizer.
    not_private: why there is neither clip nor noise, if so.
    """

    about: str
    curvature: type[Kfac] | type[AdaDPS] | None = None
    probe: Callable[[Setting], Probe] | None = None
    optimizer: str | None = None
    filtered: bool = False
    not_private: str | None = None

    def takes(self, option: str, optimizer: str = "", *, filtered: bool = False) -> bool:
        """Return whether one of ``SPECIFIC`` means something, with what comes after the noise."""
        if option == "kappa":
            return self.filtered or filtered
        if option == "floor":
            return (self.optimizer or optimizer) == "adambc"
        if option == "power":
            return self.probe is _synthetic
        return self.curvature is not None and _CURVATURE[option] in _arguments(self.curvature)

    def defaults(self, *, images: bool, filtered: bool = False) -> dict[str, Any]:
        """Return those of ``SPECIFIC`` that the method takes, as they are if nobody gives them.

        images: whether inputs are images. What is None stands for something that is no number: all
        of a rank, a floor by the noise.
        """
        found: dict[str, Any] = {}
        if self.curvature is not None:
            own = _arguments(self.curvature)
            found |= {option: own[name] for option, name in _CURVATURE.items() if name in own}
            found["refresh_every"] = _REFRESH_EVERY
        if images and self.takes("power"):
            found["power"] = _arguments(ColouredNoise)["power"]
        if self.takes("kappa", filtered=filtered):
            found["kappa"] = _arguments(DiSK)["kappa"]
        return found

    def preconditioner(self, setting: Setting) -> Preconditioner | None:
        """Return what acts before the clip; None if nothing does."""
        if self.curvature is None or self.probe is None:
            return None
        arguments = {"refresh_every": _REFRESH_EVERY, **curvature_arguments(setting.given)}
        return self.curvature(
            setting.model, self.probe(setting), sum_of_losses, seed=setting.seed, **arguments
        )


def curvature_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``Kfac`` or ``AdaDPS`` is to be made with, of options that are not None."""
    named = ((argument, given.get(option)) for option, argument in _CURVATURE.items())
    return {argument: value for argument, value in named if value is not None}


def _arguments(kind: type) -> dict[str, Any]:
    """Return the arguments that ``kind`` has a default for, and it."""
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over samples: curvature is estimated from per-sample errors."""
    return cross_entropy(outputs, targets, reduction="sum")


def synthetic_probe(data: Data, power: float | None = None) -> Probe:
    """Return what stands in for the data: noise for images, tokens for texts, else vectors.

    power: exponent of the noise's spectrum; the probe's own default if None.
    """
    if data.kind == "image":
        noise = ColouredNoise(data.shape, classes=data.classes)
        return noise if power is None else ColouredNoise(data.shape, power, data.classes)
    if data.kind == "tokens":
        # Hashed words have no order of frequency, hence uniform. The model finds padding itself.
        length = data.shape[0]
        return Tokens(VOCABULARY, length, data.classes, cls=CLS, pad=PAD, mask=False)
    return Features(data.shape[0], data.classes, "binary" if data.kind == "binary" else "sparse")


def public_inputs(data: Data, data_dir: str | None) -> tuple[Tensor, str]:
    """Return what ``load_public`` has for ``data``, in the same form."""
    tokens = data.kind == "tokens"
    return load_public(data.name, data_dir, tokens=tokens, features=data.shape[0])


def _synthetic(setting: Setting) -> Probe:
    return synthetic_probe(setting.data, setting.given.get("power"))


def _public(setting: Setting) -> Probe:
    """Return a probe of the paper's public proxy; labels are drawn uniformly."""
    inputs, _ = public_inputs(setting.data, setting.data_dir)
    return PublicData(inputs, classes=setting.data.classes)


def _oracle(setting: Setting) -> Probe:
    """Return a probe of the private data itself, which says that it is not private."""
    return PrivateData(setting.data.train, not_private=True)


METHODS: dict[str, Method] = {
    "dp-sgd": Method("clip, add noise, step"),
    "dp-kfc": Method("K-FAC before the clip, curvature from synthetic probes", Kfac, _synthetic),
    "dp-kfc-public": Method("the same, curvature from public data", Kfac, _public),
    "dp-kfc-oracle": Method(
        "the same, curvature from the private data: not private, no epsilon", Kfac, _oracle
    ),
    "adadps": Method(
        "AdaDPS: a scale for each weight before the clip, from synthetic probes", AdaDPS, _synthetic
    ),
    "adadps-public": Method("the same, scales from public data", AdaDPS, _public),
    "dp-adambc": Method("Adam whose second moment is freed of the noise's", optimizer="adambc"),
    "disk": Method("a Kalman filter on the noisy gradients", filtered=True),
    "dp-kfc+adambc": Method("dp-kfc, then dp-adambc", Kfac, _synthetic, "adambc"),
    "dp-kfc+disk": Method("dp-kfc, then disk", Kfac, _synthetic, filtered=True),
    "sgd": Method(
        "no clip, no noise: not private, no epsilon",
        not_private="trained without clip and noise",
    ),
}


def make_optimizer(
    method: Method, name: str, setting: Setting, *, filtered: bool = False
) -> Optimizer:
    """Return the optimizer ``name`` over the model's parameters, behind the method's filter.

    ``sgd`` has momentum 0.9, ``sofim`` its own defaults (beta 0.9, rho 0.5). filtered: behind
    DiSK's filter even if the method has none. Raises ValueError for a name that is not known.
    """
    optimizer = _named_optimizer(name, setting)
    if not (method.filtered or filtered):
        return optimizer
    kappa = setting.given.get("kappa")
    return DiSK(optimizer) if kappa is None else DiSK(optimizer, kappa)


def _named_optimizer(name: str, setting: Setting) -> Optimizer:
    parameters, lr = setting.model.parameters(), setting.lr
    if name == "sgd":
        return SGD(parameters, lr, momentum=0.9)
    if name == "adam":
        return Adam(parameters, lr)
    if name == "adamw":
        return AdamW(parameters, lr)
    if name == "adambc":
        return DPAdamBC(parameters, lr, floor=setting.given.get("floor"))
    if name == "sofim":
        return Sofim(parameters, lr)
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")


def describe(preconditioner: Any) -> str | None:
    """Return the preconditioner's own report, if it writes one."""
    report = getattr(preconditioner, "report", None)
    return None if report is None else str(report())
