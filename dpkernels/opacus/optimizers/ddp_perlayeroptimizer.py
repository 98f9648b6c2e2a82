"""``SimpleDistributedPerLayerOptimizer`` where Opacus keeps it."""

from dpkernels.opacus.optimizers.optimizer import DPOptimizer as SimpleDistributedPerLayerOptimizer

__all__ = ["SimpleDistributedPerLayerOptimizer"]
