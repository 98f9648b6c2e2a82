"""``AbstractGradSampleHooks`` and ``AbstractGradSampleModule`` where Opacus keeps them."""

from dpkernels.opacus.grad_sample.grad_sample_module import (
    GradSampleHooks as AbstractGradSampleHooks,
)
from dpkernels.opacus.grad_sample.grad_sample_module import (
    GradSampleModule as AbstractGradSampleModule,
)

__all__ = ["AbstractGradSampleHooks", "AbstractGradSampleModule"]
