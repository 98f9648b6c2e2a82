"""The names that Opacus' users know, on our engine: change the import, and nothing else.

``import opacus`` becomes ``import dpkernels.opacus as opacus``, ``from opacus...`` becomes ``from
dpkernels.opacus...``. What is different, and why, is in the README under "Moving from Opacus".
"""

from dpkernels.opacus import utils
from dpkernels.opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from dpkernels.opacus.privacy_engine import PrivacyEngine

__all__ = [
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "__version__",
    "utils",
]

# Of Opacus, whose names these are, and after the plus whose code it is.
__version__ = "1.6.0+dpkernels"
