"""Preconditioners: which operator goes onto the gradients of which layer, before they are clipped.

A preconditioner may depend on synthetic or public data and on released parameters, never on the
batch that it is applied to.
"""

from dpkernels.engine.sides import IDENTITY, FixedSides, Preconditioner, Scale, Sides
from dpkernels.precondition.adadps import AdaDPS, AdaDPSReport, LayerScale
from dpkernels.precondition.estimate import estimate_moments
from dpkernels.precondition.kfac import Kfac
from dpkernels.precondition.moments import Estimation, LayerMoments
from dpkernels.precondition.probes import (
    ColouredNoise,
    Features,
    PrivateData,
    Probe,
    PublicData,
    Tokens,
)
from dpkernels.precondition.report import KfacReport, LayerFactors

__all__ = [
    "IDENTITY",
    "AdaDPS",
    "AdaDPSReport",
    "ColouredNoise",
    "Estimation",
    "Features",
    "FixedSides",
    "Kfac",
    "KfacReport",
    "LayerFactors",
    "LayerMoments",
    "LayerScale",
    "Preconditioner",
    "PrivateData",
    "Probe",
    "PublicData",
    "Scale",
    "Sides",
    "Tokens",
    "estimate_moments",
]
