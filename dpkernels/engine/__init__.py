"""Private gradients of any PyTorch model: capture, norms, factors, sum, noise, optimizer."""

from dpkernels.engine.clipping import Adaptive, Automatic, Clipping, Flat, NoisyCount, PerLayer
from dpkernels.engine.convert import batch_norm_to_group_norm
from dpkernels.engine.distributed import Ranks
from dpkernels.engine.in_place import make_plain
from dpkernels.engine.layers.layer import Unsupported
from dpkernels.engine.private import PrivateTraining, make_private
from dpkernels.engine.report import LayerReport, Report

__all__ = [
    "Adaptive",
    "Automatic",
    "Clipping",
    "Flat",
    "LayerReport",
    "NoisyCount",
    "PerLayer",
    "PrivateTraining",
    "Ranks",
    "Report",
    "Unsupported",
    "batch_norm_to_group_norm",
    "make_plain",
    "make_private",
]
