"""The criterion that ``make_private`` returns for the ghost modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dpkernels.opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule
from dpkernels.opacus.optimizers import DPOptimizer


class DPLossFastGradientClipping:
    """A loss that is an average, or a sum, over samples, each with a loss of its own.

    Opacus' takes two backward passes behind this; the engine needs one, so what it returns is an
    ordinary tensor of one element, to be added up, scaled and sent back.

    criterion: of ``nn`` kind, with ``reduction``; or any function, whose results for samples, if it
        returns more than one element, are reduced here.
    """

    def __init__(
        self,
        module: GradSampleModule | GradSampleHooks,
        optimizer: DPOptimizer,
        criterion: Callable[..., Tensor],
        loss_reduction: str = "mean",
    ) -> None:
        given = {
            "loss_reduction": loss_reduction,
            "criterion.reduction": getattr(criterion, "reduction", loss_reduction),
            "module.loss_reduction": module.loss_reduction,
            "optimizer.loss_reduction": optimizer.loss_reduction,
        }
        if set(given.values()) not in ({"mean"}, {"sum"}):
            raise ValueError(f"criterion: all reductions must be 'mean', or all 'sum', got {given}")
        self.module = module
        self.optimizer = optimizer
        self.criterion = criterion
        self.loss_reduction = loss_reduction

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """Return the loss.

        shape: (B, T, ...) of outputs that were flattened to B T rows for the criterion; a sample's
            loss is the average, or sum, over its T, without those that ``ignore_index`` marks.
        """
        losses = self._losses(*args, **kwargs)
        if shape is not None and losses.shape[:1] == (shape[0] * shape[1],):
            losses = losses.view(shape[0], shape[1])
            if self.loss_reduction == "mean":
                target = kwargs.get("target", args[1] if len(args) > 1 else None)
                losses = losses.sum(1) / self._counted(target, shape)
        if losses.dim() == 0:
            return losses
        return losses.sum() if self.loss_reduction == "sum" else losses.mean()

    def _losses(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the criterion's results before they are reduced."""
        criterion: Any = self.criterion
        if not hasattr(criterion, "reduction"):
            return self.criterion(*args, **kwargs)
        reduction, criterion.reduction = criterion.reduction, "none"
        try:
            return self.criterion(*args, **kwargs)
        finally:
            criterion.reduction = reduction

    def _counted(self, target: Tensor | None, shape: Sequence[int]) -> Tensor | int:
        """Return how many positions of each sample count."""
        ignored = getattr(self.criterion, "ignore_index", None)
        if ignored is None or target is None:
            return shape[1]
        counted: Tensor = (target.view(shape[0], shape[1]) != ignored).sum(1)
        return counted.clamp(min=1)
