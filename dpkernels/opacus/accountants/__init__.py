"""Accountants under Opacus' names; epsilon comes from ``dpkernels.privacy.accountants``."""

from dpkernels.opacus.accountants import analysis
from dpkernels.opacus.accountants.accountant import IAccountant
from dpkernels.opacus.accountants.gdp import GaussianAccountant
from dpkernels.opacus.accountants.prv import PRVAccountant
from dpkernels.opacus.accountants.rdp import RDPAccountant
from dpkernels.opacus.accountants.registry import create_accountant, register_accountant

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "PRVAccountant",
    "RDPAccountant",
    "analysis",
    "create_accountant",
    "register_accountant",
]
