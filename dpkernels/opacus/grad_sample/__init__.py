"""The model that ``make_private`` returns; Opacus' other names are the same one.

Opacus has a class for each way to compute gradients of samples. Here there is one engine.
"""

from dpkernels.opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule
from dpkernels.opacus.grad_sample.utils import (
    get_gsm_class,
    get_hooks_class,
    prepare_module,
    register_grad_sampler,
    register_norm_sampler,
    wrap_model,
)

AbstractGradSampleHooks = GradSampleHooks
AbstractGradSampleModule = GradSampleModule
GradSampleHooksFastGradientClipping = GradSampleHooks
GradSampleHooksFastGradientClippingFSDP = GradSampleHooks
GradSampleModuleExpandedWeights = GradSampleModule
GradSampleModuleFastGradientClipping = GradSampleModule
GradSampleModuleFastGradientClippingFSDP = GradSampleModule

__all__ = [
    "AbstractGradSampleHooks",
    "AbstractGradSampleModule",
    "GradSampleHooks",
    "GradSampleHooksFastGradientClipping",
    "GradSampleHooksFastGradientClippingFSDP",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleFastGradientClipping",
    "GradSampleModuleFastGradientClippingFSDP",
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]
