"""``DPOptimizer``; Opacus' other names are the same one, because there is one engine."""

from dpkernels.opacus.optimizers.optimizer import DPOptimizer

AdaClipDPOptimizer = DPOptimizer
DPOptimizerFastGradientClipping = DPOptimizer
DPPerLayerOptimizer = DPOptimizer
DistributedDPOptimizer = DPOptimizer
DistributedDPOptimizerFastGradientClipping = DPOptimizer
FSDPOptimizerFastGradientClipping = DPOptimizer
SimpleDistributedPerLayerOptimizer = DPOptimizer

__all__ = [
    "AdaClipDPOptimizer",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "FSDPOptimizerFastGradientClipping",
    "SimpleDistributedPerLayerOptimizer",
]
