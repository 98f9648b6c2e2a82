"""Runs: private training whose guarantee is known, from its loader to its report."""

from __future__ import annotations

from dpkernels.run.loader import PrivateLoader
from dpkernels.run.private_run import PrivateRun
from dpkernels.run.report import RunReport

__all__ = ["PrivateLoader", "PrivateRun", "RunReport"]
