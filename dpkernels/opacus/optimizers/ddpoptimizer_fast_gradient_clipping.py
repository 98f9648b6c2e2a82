"""``DistributedDPOptimizerFastGradientClipping`` where Opacus keeps it."""

from dpkernels.opacus.optimizers.optimizer import (
    DPOptimizer as DistributedDPOptimizerFastGradientClipping,
)

__all__ = ["DistributedDPOptimizerFastGradientClipping"]
