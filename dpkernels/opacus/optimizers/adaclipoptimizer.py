"""``AdaClipDPOptimizer`` where Opacus keeps it."""

from dpkernels.opacus.optimizers.optimizer import DPOptimizer as AdaClipDPOptimizer

__all__ = ["AdaClipDPOptimizer"]
