"""Accountants: which (epsilon, delta) a history of statements amounts to."""

from __future__ import annotations

from dpkernels.privacy.accountants.accountant import Accountant
from dpkernels.privacy.accountants.gaussian import GaussianAccountant
from dpkernels.privacy.accountants.pld import PldAccountant
from dpkernels.privacy.accountants.rdp import RdpAccountant

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "GaussianAccountant",
    "PldAccountant",
    "RdpAccountant",
    "make_accountant",
]

ACCOUNTANTS: dict[str, type[Accountant]] = {
    kind.name: kind for kind in (GaussianAccountant, RdpAccountant, PldAccountant)
}


def make_accountant(name: str) -> Accountant:
    """Return a new accountant.

    name: "gaussian" is exact, without sampling; "pld" is tight to a small fraction of a percent
        with any sampling; "rdp" is looser, and fastest.
    """
    if name not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, got {name!r}")
    return ACCOUNTANTS[name]()
