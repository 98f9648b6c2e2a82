"""``GaussianAccountant``: Gaussian differential privacy, where it is exact."""

from __future__ import annotations

from dpkernels.opacus.accountants.statements import StatementAccountant


class GaussianAccountant(StatementAccountant):
    """Exact for steps that see all records, or each record once in an epoch.

    Poisson sampling at a rate below 1 is refused: the central limit that Opacus takes there is not
    an upper bound.
    """

    name = "gaussian"

    @classmethod
    def mechanism(cls) -> str:
        """Return ``gdp``."""
        return "gdp"
