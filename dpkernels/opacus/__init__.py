"""The names that Opacus' users know, on our engine: change the import, and nothing else.

``import opacus`` becomes ``import dpkernels.opacus as opacus``, ``from opacus...`` becomes ``from
dpkernels.opacus...``. What is different, and why, is in the README under "Moving from Opacus".
"""

# All of them, because scripts write opacus.layers.DPLSTM after nothing but ``import opacus``.
from dpkernels.opacus import (
    accountants,
    data_loader,
    distributed,
    grad_sample,
    layers,
    optimizers,
    privacy_engine,
    schedulers,
    utils,
    validators,
    version,
)
from dpkernels.opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from dpkernels.opacus.privacy_engine import PrivacyEngine
from dpkernels.opacus.version import __version__

__all__ = [
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "PrivacyEngine",
    "__version__",
    "accountants",
    "data_loader",
    "distributed",
    "grad_sample",
    "layers",
    "optimizers",
    "privacy_engine",
    "schedulers",
    "utils",
    "validators",
    "version",
]
