"""``DistributedDPOptimizer`` where Opacus keeps it."""

from dpkernels.opacus.optimizers.optimizer import DPOptimizer as DistributedDPOptimizer

__all__ = ["DistributedDPOptimizer"]
