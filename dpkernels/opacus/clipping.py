"""Opacus' words for clipping, and the engine's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpkernels.engine import Adaptive, Clipping, Flat, PerLayer, PrivateTraining
from dpkernels.ops.checks import check_finite

# Opacus' arguments of adaptive clipping, and ours.
_ADAPTIVE = {
    "target_unclipped_quantile": "quantile",
    "clipbound_learning_rate": "rate",
    "max_clipbound": "maximum",
    "min_clipbound": "minimum",
    "unclipped_num_std": "count_std",
}


def clipping_of(
    clipping: str,
    max_grad_norm: float | Sequence[float],
    options: Mapping[str, Any],
    optimizer: Optimizer,
    loss_reduction: str,
) -> Clipping:
    """Return what the engine clips by.

    clipping: ``flat``, ``per_layer`` or ``adaptive``.
    max_grad_norm: a number; for ``per_layer`` also one for each parameter, as Opacus takes them.
    options: of ``adaptive``, all five of them.

    Raises ValueError or TypeError for what does not fit together.
    """
    if clipping not in ("flat", "per_layer", "adaptive"):
        raise ValueError(
            f"make_private: clipping must be 'flat', 'per_layer' or 'adaptive', got {clipping!r}"
        )
    wanted = set(_ADAPTIVE) if clipping == "adaptive" else set()
    if unknown := options.keys() - wanted:
        raise TypeError(
            f"make_private: {', '.join(sorted(unknown))}: no such argument with "
            f"clipping={clipping!r}; leave it out"
        )
    if missing := wanted - options.keys():
        raise ValueError(
            f"make_private: clipping='adaptive' needs {', '.join(sorted(missing))}, too"
        )
    if clipping == "per_layer":
        if isinstance(max_grad_norm, Sequence):
            _check_bounds(max_grad_norm, optimizer)
            return PerLayer(math.hypot(*max_grad_norm))
        check_finite("make_private", "max_grad_norm", max_grad_norm, above=0.0)
        return PerLayer(float(max_grad_norm))
    if isinstance(max_grad_norm, Sequence):
        raise ValueError(
            f"make_private: max_grad_norm must be one number with clipping={clipping!r}, got "
            f"{max_grad_norm}; several are for clipping='per_layer'"
        )
    check_finite("make_private", "max_grad_norm", max_grad_norm, above=0.0)
    if clipping == "flat":
        return Flat(float(max_grad_norm))
    if loss_reduction != "mean":
        raise ValueError(
            "make_private: clipping='adaptive' needs loss_reduction='mean': the samples within the "
            "bound are counted against the expected batch size"
        )
    for name in _ADAPTIVE:
        check_finite("make_private", name, options[name], above=0.0)
    if options["target_unclipped_quantile"] >= 1:
        raise ValueError(
            "make_private: target_unclipped_quantile must be in (0, 1), got "
            f"{options['target_unclipped_quantile']}"
        )
    if not options["min_clipbound"] < options["max_clipbound"]:
        raise ValueError(
            "make_private: min_clipbound must be below max_clipbound, got "
            f"{options['min_clipbound']} and {options['max_clipbound']}"
        )
    ours = {name: options[theirs] for theirs, name in _ADAPTIVE.items()}
    return Adaptive(float(max_grad_norm), **ours)


def clipping_by_hand(
    max_grad_norm: float | Sequence[float],
    options: Mapping[str, Any],
    optimizer: Optimizer,
    loss_reduction: str,
) -> Clipping:
    """Return what the engine clips by, of an optimizer that is built by hand.

    Which kind it is shows in the arguments: options are those of adaptive clipping, and several
    bounds are for the parameters.
    """
    if options.keys() & set(_ADAPTIVE):
        kind = "adaptive"
    else:
        kind = "per_layer" if isinstance(max_grad_norm, Sequence) else "flat"
    return clipping_of(kind, max_grad_norm, options, optimizer, loss_reduction)


def set_layer_bounds(
    training: PrivateTraining, optimizer: Optimizer, bounds: Sequence[float]
) -> None:
    """Bound each layer by the root of the sum of squares of its parameters' bounds.

    bounds: one for each trained parameter of the optimizer, in its order. Opacus clips weight and
    bias apart; here they are one gradient. The sensitivity of the whole is the same.
    """
    of = {id(p): bound for p, bound in zip(_trained(optimizer), bounds, strict=True)}
    training.clipping = PerLayer(
        {
            name: math.hypot(*(of[id(parameter)] for parameter in parameters))
            for name, parameters in training.layers.items()
        }
    )


def _check_bounds(bounds: Sequence[float], optimizer: Optimizer) -> None:
    if len(bounds) != len(_trained(optimizer)):
        raise ValueError(
            f"make_private: max_grad_norm must have a number for each of the "
            f"{len(_trained(optimizer))} trained parameters, got {len(bounds)}"
        )
    for bound in bounds:
        check_finite("make_private", "max_grad_norm", bound, above=0.0)


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.requires_grad]


def gradient_noise(noise_multiplier: float, clipping: object) -> float:
    """Return what is left of ``noise_multiplier`` for gradients, in units of their bound.

    A step of adaptive clipping releases a count, too, of sensitivity 1/2 and noise s. Both together
    have the multiplier sigma if that of gradients is (sigma^-2 - (2 s)^-2)^(-1/2) (Andrew et al.
    2021, theorem 1).

    Raises ValueError where the count alone would need more noise than it has.
    """
    check_finite("make_private", "noise_multiplier", noise_multiplier, at_least=0.0)
    if not isinstance(clipping, Adaptive) or noise_multiplier == 0:
        return noise_multiplier
    if noise_multiplier >= 2 * clipping.count_std:
        raise ValueError(
            "make_private: noise_multiplier must be below 2 unclipped_num_std, which is "
            f"{2 * clipping.count_std:g}, got {noise_multiplier}; raise unclipped_num_std: the "
            "count of samples within the bound needs noise, too"
        )
    return 1 / math.sqrt(noise_multiplier**-2 - (2 * clipping.count_std) ** -2)
