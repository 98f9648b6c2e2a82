"""``GradSampleModuleExpandedWeights`` where Opacus keeps it."""

from dpkernels.opacus.grad_sample.grad_sample_module import (
    GradSampleModule as GradSampleModuleExpandedWeights,
)

__all__ = ["GradSampleModuleExpandedWeights"]
