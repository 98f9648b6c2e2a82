"""The engine on a model and an optimizer, with arguments in Opacus' words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from dpkernels import engine
from dpkernels.engine import Clipping, PrivateTraining
from dpkernels.opacus.arguments import Processes
from dpkernels.opacus.batch_second import BatchSecond
from dpkernels.opacus.clipping import set_layer_bounds
from dpkernels.opacus.holding import check_no_batch_waits, noise_key_for, release
from dpkernels.opacus.utils.uniform_sampler import seed_of


@dataclass(frozen=True)
class Attached:
    """A private training, and how it is ended.

    batch_second: what swaps axes, for a model with samples on the second one.
    """

    training: PrivateTraining
    batch_second: BatchSecond | None

    def end(self) -> None:
        """Give model and optimizer back as they were."""
        if self.batch_second is not None:
            self.batch_second.end()
        self.training.detach()


def attach(
    processes: Processes,
    optimizer: Optimizer,
    *,
    noise_multiplier: float,
    clipping: Clipping,
    layer_bounds: Sequence[float] | None,
    expected_batch_size: float,
    loss_reduction: str,
    generator: torch.Generator | None,
    batch_first: bool,
) -> Attached:
    """Begin private training; what the model was in before is ended.

    noise_multiplier, clipping: as the engine takes them. layer_bounds: one for each parameter, of
    per-layer clipping. expected_batch_size: of no account if losses are sums.
    """
    check_no_batch_waits(processes.inside)
    batch_second = None if batch_first else BatchSecond(processes.trained)
    release(processes.inside)
    training = engine.make_private(
        processes.trained if batch_second is None else batch_second.shell,
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=clipping,
        expected_batch_size=expected_batch_size if loss_reduction == "mean" else 1.0,
        loss_reduction=loss_reduction,  # type: ignore[arg-type]
        noise_key=noise_key_for(processes.inside, seed_of(generator)),
        several_calls="same samples",
        process_group=processes.group,
    )
    if batch_second is not None:
        batch_second.begin()
    attached = Attached(training, batch_second)
    try:
        if layer_bounds is not None:
            set_layer_bounds(training, optimizer, layer_bounds)
    except BaseException:
        attached.end()
        raise
    return attached
