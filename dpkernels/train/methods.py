"""The methods that ``dpkernels train`` knows: what acts before the clip, and what after the noise.

A method is a preconditioner, an optimizer, and possibly a filter between noise and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpkernels.precondition.adadps import AdaDPS
from dpkernels.precondition.kfac import Kfac
from dpkernels.train.data import Data, load_public
from dpkernels.train.text import CLS, PAD, VOCABULARY

if TYPE_CHECKING:
    from dpkernels.engine.sides import Preconditioner
    from dpkernels.precondition.probes import Probe

OPTIMIZERS = ("adam", "adamw", "sgd", "adambc")
_OF_KFAC = ("damping", "normalise", "sides", "rank", "probe_batches")
# What only some methods take; None leaves it to the method.
SPECIFIC = (*_OF_KFAC, "power", "refresh_every", "floor", "kappa")


@dataclass(frozen=True)
class Setting:
    """What a method is made for.

    lr: the learning rate.
    refresh_every: steps after which curvature is estimated anew. seed: of the probes.
    curvature: arguments of ``Kfac`` or ``AdaDPS`` that are not its defaults.
    power: exponent of the spectrum of image probes. floor: DP-AdamBC's. kappa: DiSK's. None leaves
        each at its own default.
    """

    model: nn.Module
    data: Data
    data_dir: str | None
    lr: float
    refresh_every: int
    seed: int
    curvature: Mapping[str, Any] = field(default_factory=dict)
    power: float | None = None
    floor: float | None = None
    kappa: float | None = None


@dataclass(frozen=True)
class Method:
    """A row of the paper's tables.

    about: one line for people.
    preconditioner: what makes it, or None.
    optimizer: the one that the method is named for, None where the caller chooses.
    filtered: whether DiSK's filter stands before the optimizer.
    not_private: why there is neither clip nor noise, if so.
    options: which of ``SPECIFIC`` its preconditioner takes beside ``refresh_every``.
    """

    about: str
    preconditioner: Callable[[Setting], Preconditioner] | None = None
    optimizer: str | None = None
    filtered: bool = False
    not_private: str | None = None
    options: tuple[str, ...] = ()

    def takes(self, option: str, optimizer: str) -> bool:
        """Return whether one of ``SPECIFIC`` means something, with that optimizer behind it."""
        if option == "refresh_every":
            return self.preconditioner is not None
        if option == "kappa":
            return self.filtered
        if option == "floor":
            return optimizer == "adambc"
        return option in self.options


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over samples: curvature is estimated from per-sample errors."""
    return cross_entropy(outputs, targets, reduction="sum")


def synthetic_probe(data: Data, power: float | None = None) -> Probe:
    """Return what stands in for the data: noise for images, tokens for texts, else vectors.

    power: exponent of the noise's spectrum; the probe's own default if None.
    """
    from dpkernels.precondition.probes import ColouredNoise, Features, Tokens

    if data.kind == "image":
        noise = ColouredNoise(data.shape, classes=data.classes)
        return noise if power is None else ColouredNoise(data.shape, power, data.classes)
    if data.kind == "tokens":
        # Hashed words have no order of frequency, hence uniform. The model finds padding itself.
        length = data.shape[0]
        return Tokens(VOCABULARY, length, data.classes, cls=CLS, pad=PAD, mask=False)
    return Features(data.shape[0], data.classes, "binary" if data.kind == "binary" else "sparse")


def public_probe(setting: Setting) -> Probe:
    """Return a probe of the paper's public proxy; labels are drawn uniformly."""
    from dpkernels.precondition.probes import PublicData

    data = setting.data
    inputs, _ = load_public(data.name, setting.data_dir, tokens=data.kind == "tokens")
    return PublicData(inputs, classes=data.classes)


def oracle_probe(setting: Setting) -> Probe:
    """Return a probe of the private data itself, which says that it is not private."""
    from dpkernels.precondition.probes import PrivateData

    return PrivateData(setting.data.train, not_private=True)


def _estimated(
    kind: Callable[..., Preconditioner], probe: Callable[[Setting], Probe]
) -> Callable[[Setting], Preconditioner]:
    """Return what makes ``Kfac`` or ``AdaDPS`` with a probe."""

    def make(setting: Setting) -> Preconditioner:
        return kind(
            setting.model,
            probe(setting),
            sum_of_losses,
            refresh_every=setting.refresh_every,
            seed=setting.seed,
            **setting.curvature,
        )

    return make


def _synthetic(setting: Setting) -> Probe:
    return synthetic_probe(setting.data, setting.power)


_SYNTHETIC_KFAC = (*_OF_KFAC, "power")
_OF_ADADPS = ("damping", "probe_batches")

METHODS: dict[str, Method] = {
    "dp-sgd": Method("clip, add noise, step"),
    "dp-kfc": Method(
        "K-FAC before the clip, curvature from synthetic probes",
        _estimated(Kfac, _synthetic),
        options=_SYNTHETIC_KFAC,
    ),
    "dp-kfc-public": Method(
        "the same, curvature from public data", _estimated(Kfac, public_probe), options=_OF_KFAC
    ),
    "dp-kfc-oracle": Method(
        "the same, curvature from the private data: not private, no epsilon",
        _estimated(Kfac, oracle_probe),
        options=_OF_KFAC,
    ),
    "adadps": Method(
        "AdaDPS: a scale for each weight before the clip, from synthetic probes",
        _estimated(AdaDPS, _synthetic),
        options=(*_OF_ADADPS, "power"),
    ),
    "adadps-public": Method(
        "the same, scales from public data", _estimated(AdaDPS, public_probe), options=_OF_ADADPS
    ),
    "dp-adambc": Method("Adam whose second moment is freed of the noise's", optimizer="adambc"),
    "disk": Method("a Kalman filter on the noisy gradients", filtered=True),
    "dp-kfc+adambc": Method(
        "dp-kfc, then dp-adambc", _estimated(Kfac, _synthetic), "adambc", options=_SYNTHETIC_KFAC
    ),
    "dp-kfc+disk": Method(
        "dp-kfc, then disk", _estimated(Kfac, _synthetic), filtered=True, options=_SYNTHETIC_KFAC
    ),
    "sgd": Method(
        "no clip, no noise: not private, no epsilon",
        not_private="trained without clip and noise",
    ),
}


def make_optimizer(method: Method, name: str, setting: Setting) -> Optimizer:
    """Return the optimizer ``name`` over the model's parameters, behind the method's filter.

    ``sgd`` has momentum 0.9. Raises ValueError for a name that is not known.
    """
    optimizer = _named_optimizer(name, setting)
    if not method.filtered:
        return optimizer
    from dpkernels.postprocess import DiSK

    return DiSK(optimizer) if setting.kappa is None else DiSK(optimizer, setting.kappa)


def _named_optimizer(name: str, setting: Setting) -> Optimizer:
    parameters, lr = setting.model.parameters(), setting.lr
    if name == "sgd":
        return SGD(parameters, lr, momentum=0.9)
    if name == "adam":
        return Adam(parameters, lr)
    if name == "adamw":
        return AdamW(parameters, lr)
    if name == "adambc":
        from dpkernels.postprocess import DPAdamBC

        return DPAdamBC(parameters, lr, floor=setting.floor)
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")


def describe(preconditioner: Any) -> str | None:
    """Return the preconditioner's own report, if it writes one."""
    report = getattr(preconditioner, "report", None)
    return None if report is None else str(report())
