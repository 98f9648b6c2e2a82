"""Accountants by name."""

from __future__ import annotations

from dpkernels.opacus.accountants.accountant import IAccountant
from dpkernels.opacus.accountants.gdp import GaussianAccountant
from dpkernels.opacus.accountants.prv import PRVAccountant
from dpkernels.opacus.accountants.rdp import RDPAccountant

_ACCOUNTANTS: dict[str, type[IAccountant]] = {
    "rdp": RDPAccountant,
    "gdp": GaussianAccountant,
    "prv": PRVAccountant,
}


def register_accountant(mechanism: str, accountant: type[IAccountant], force: bool = False) -> None:
    """Make ``accountant`` known as ``mechanism``; ``force`` replaces one that is known already."""
    if mechanism in _ACCOUNTANTS and not force:
        raise ValueError(
            f"register_accountant: mechanism {mechanism!r} is taken; pass force=True to replace it"
        )
    _ACCOUNTANTS[mechanism] = accountant


def create_accountant(mechanism: str) -> IAccountant:
    """Return a new accountant of the name ``mechanism``."""
    if mechanism not in _ACCOUNTANTS:
        raise ValueError(
            f"create_accountant: mechanism must be one of {', '.join(sorted(_ACCOUNTANTS))}, got "
            f"{mechanism!r}"
        )
    return _ACCOUNTANTS[mechanism]()
