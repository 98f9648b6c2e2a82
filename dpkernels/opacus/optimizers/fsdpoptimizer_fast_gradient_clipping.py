"""``FSDPOptimizerFastGradientClipping`` where Opacus keeps it."""

from dpkernels.opacus.optimizers.optimizer import DPOptimizer as FSDPOptimizerFastGradientClipping

__all__ = ["FSDPOptimizerFastGradientClipping"]
