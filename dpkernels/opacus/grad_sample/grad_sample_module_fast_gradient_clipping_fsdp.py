"""The classes of fast gradient clipping of sharded models where Opacus keeps them."""

from dpkernels.opacus.grad_sample.grad_sample_module import (
    GradSampleHooks as GradSampleHooksFastGradientClippingFSDP,
)
from dpkernels.opacus.grad_sample.grad_sample_module import (
    GradSampleModule as GradSampleModuleFastGradientClippingFSDP,
)

__all__ = ["GradSampleHooksFastGradientClippingFSDP", "GradSampleModuleFastGradientClippingFSDP"]
