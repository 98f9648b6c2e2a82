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
    "get_optimizer_class",
]


def get_optimizer_class(
    clipping: str, distributed: bool, grad_sample_mode: str | None = None
) -> type[DPOptimizer]:
    """Return the class for a way of clipping: the same for all of them."""
    if clipping not in ("flat", "per_layer", "adaptive"):
        raise ValueError(
            "get_optimizer_class: clipping must be 'flat', 'per_layer' or 'adaptive', got "
            f"{clipping!r}"
        )
    return DPOptimizer
