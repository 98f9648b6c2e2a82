"""``PRVAccountant``: privacy loss distributions."""

from __future__ import annotations

from dpkernels.opacus.accountants.statements import StatementAccountant


class PRVAccountant(StatementAccountant):
    """Privacy loss distributions, the tightest of the three.

    Opacus adds up privacy loss random variables, which are the same thing, to an error of 0.01 in
    epsilon; here epsilon is rounded up.
    """

    name = "pld"

    @classmethod
    def mechanism(cls) -> str:
        """Return ``prv``."""
        return "prv"
