"""The functions behind Opacus' accountants that scripts import, from our accountants."""

from dpkernels.opacus.accountants.analysis import gdp, rdp

__all__ = ["gdp", "rdp"]
