"""The classes of fast gradient clipping where Opacus keeps them."""

from dpkernels.opacus.grad_sample.grad_sample_module import (
    GradSampleHooks as GradSampleHooksFastGradientClipping,
)
from dpkernels.opacus.grad_sample.grad_sample_module import (
    GradSampleModule as GradSampleModuleFastGradientClipping,
)

__all__ = ["GradSampleHooksFastGradientClipping", "GradSampleModuleFastGradientClipping"]
