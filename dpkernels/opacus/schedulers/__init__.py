"""Schedules of the noise multiplier and of the clipping norm, one value for each step or epoch."""

from dpkernels.opacus.schedulers.grad_clip_scheduler import (
    ExponentialGradClip,
    LambdaGradClip,
    StepGradClip,
    _GradClipScheduler,
)
from dpkernels.opacus.schedulers.noise_scheduler import (
    ExponentialNoise,
    LambdaNoise,
    StepNoise,
    _NoiseScheduler,
)

__all__ = [
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaGradClip",
    "LambdaNoise",
    "StepGradClip",
    "StepNoise",
    "_GradClipScheduler",
    "_NoiseScheduler",
]
