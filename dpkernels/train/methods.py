"""The methods that ``dpkernels train`` knows: what acts before the clip, and what after the noise.

A method is a preconditioner, an optimizer, and possibly a filter between noise and optimizer. Each
is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpkernels.train.data import Data, load_public

if TYPE_CHECKING:
    from dpkernels.engine.sides import Preconditioner
    from dpkernels.precondition.probes import Probe

OPTIMIZERS = ("adam", "adamw", "sgd", "adambc")


@dataclass(frozen=True)
class Setting:
    """What a method is made for.

    lr: the learning rate.
    refresh_every: steps after which curvature is estimated anew. seed: of the probes.
    """

    model: nn.Module
    data: Data
    data_dir: str | None
    lr: float
    refresh_every: int
    seed: int


@dataclass(frozen=True)
class Method:
    """A row of the paper's tables.

    about: one line for people.
    preconditioner: what makes it, or None.
    optimizer: the one that the method is named for, None where the caller chooses.
    filtered: whether DiSK's filter stands before the optimizer.
    not_private: why there is neither clip nor noise, if so.
    """

    about: str
    preconditioner: Callable[[Setting], Preconditioner] | None = None
    optimizer: str | None = None
    filtered: bool = False
    not_private: str | None = None


def sum_of_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over samples: curvature is estimated from per-sample errors."""
    return cross_entropy(outputs, targets, reduction="sum")


def synthetic_probe(data: Data) -> Probe:
    """Return what stands in for the data: pink noise for images, else vectors of the same kind."""
    from dpkernels.precondition.probes import ColouredNoise, Features

    if data.kind == "image":
        return ColouredNoise(data.shape, classes=data.classes)
    return Features(data.shape[0], data.classes, "binary" if data.kind == "binary" else "sparse")


def public_probe(setting: Setting) -> Probe:
    """Return a probe of the paper's public proxy; labels are drawn uniformly."""
    from dpkernels.precondition.probes import PublicData

    inputs, _ = load_public(setting.data.name, setting.data_dir)
    return PublicData(inputs, classes=setting.data.classes)


def oracle_probe(setting: Setting) -> Probe:
    """Return a probe of the private data itself, which says that it is not private."""
    from dpkernels.precondition.probes import PrivateData

    return PrivateData(setting.data.train, not_private=True)


def _kfac(probe: Callable[[Setting], Probe]) -> Callable[[Setting], Preconditioner]:
    def make(setting: Setting) -> Preconditioner:
        from dpkernels.precondition.kfac import Kfac

        return Kfac(
            setting.model,
            probe(setting),
            sum_of_losses,
            refresh_every=setting.refresh_every,
            seed=setting.seed,
        )

    return make


def _synthetic(setting: Setting) -> Probe:
    return synthetic_probe(setting.data)


def _adadps(probe: Callable[[Setting], Probe]) -> Callable[[Setting], Preconditioner]:
    def make(setting: Setting) -> Preconditioner:
        from dpkernels.precondition.adadps import AdaDPS

        return AdaDPS(
            setting.model,
            probe(setting),
            sum_of_losses,
            refresh_every=setting.refresh_every,
            seed=setting.seed,
        )

    return make


METHODS: dict[str, Method] = {
    "dp-sgd": Method("clip, add noise, step"),
    "dp-kfc": Method("K-FAC before the clip, curvature from synthetic probes", _kfac(_synthetic)),
    "dp-kfc-public": Method("the same, curvature from public data", _kfac(public_probe)),
    "dp-kfc-oracle": Method(
        "the same, curvature from the private data: not private, no epsilon", _kfac(oracle_probe)
    ),
    "adadps": Method(
        "AdaDPS: a scale for each weight before the clip, from synthetic probes",
        _adadps(_synthetic),
    ),
    "adadps-public": Method("the same, scales from public data", _adadps(public_probe)),
    "dp-adambc": Method("Adam whose second moment is freed of the noise's", optimizer="adambc"),
    "disk": Method("a Kalman filter on the noisy gradients", filtered=True),
    "dp-kfc+adambc": Method("dp-kfc, then dp-adambc", _kfac(_synthetic), "adambc"),
    "dp-kfc+disk": Method("dp-kfc, then disk", _kfac(_synthetic), filtered=True),
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

    return DiSK(optimizer)


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

        return DPAdamBC(parameters, lr)
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")


def describe(preconditioner: Any) -> str | None:
    """Return the preconditioner's own report, if it writes one."""
    report = getattr(preconditioner, "report", None)
    return None if report is None else str(report())
