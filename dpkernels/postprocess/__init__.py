"""What acts after the noise: optimizers that know how much noise a private gradient carries.

They see released gradients only, so that they cost no privacy, and combine with any preconditioner.
"""

from dpkernels.postprocess.adam_bc import DPAdamBC
from dpkernels.postprocess.disk import DiSK
from dpkernels.postprocess.noise_level import NoiseStd, NoisyTraining

__all__ = ["DPAdamBC", "DiSK", "NoiseStd", "NoisyTraining"]
