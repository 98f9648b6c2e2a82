"""What acts after the noise: optimizers for private gradients, some told how noisy those are.

They see released gradients only, so that they cost no privacy, and combine with any preconditioner.
"""

from dpkernels.postprocess.adam_bc import DPAdamBC
from dpkernels.postprocess.disk import DiSK
from dpkernels.postprocess.noise_level import NoiseStd, NoisyTraining
from dpkernels.postprocess.sofim import Sofim

__all__ = ["DPAdamBC", "DiSK", "NoiseStd", "NoisyTraining", "Sofim"]
