"""What Opacus keeps under this name, which scripts import from here."""

from dpkernels.opacus.utils import module_utils, uniform_sampler

__all__ = ["module_utils", "uniform_sampler"]
