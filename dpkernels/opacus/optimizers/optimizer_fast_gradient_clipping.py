"""``DPOptimizerFastGradientClipping`` where Opacus keeps it."""

from dpkernels.opacus.optimizers.optimizer import DPOptimizer as DPOptimizerFastGradientClipping

__all__ = ["DPOptimizerFastGradientClipping"]
