"""``DPPerLayerOptimizer`` where Opacus keeps it."""

from dpkernels.opacus.optimizers.optimizer import DPOptimizer as DPPerLayerOptimizer

__all__ = ["DPPerLayerOptimizer"]
