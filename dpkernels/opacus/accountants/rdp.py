"""``RDPAccountant``: Renyi differential privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpkernels.opacus.accountants.statements import StatementAccountant
from dpkernels.privacy.accountants import RdpAccountant


class RDPAccountant(StatementAccountant):
    """Renyi differential privacy, over more orders than Opacus takes."""

    name = "rdp"

    def get_epsilon(
        self, delta: float, alphas: Sequence[float] | None = None, **kwargs: Any
    ) -> float:
        """Return an upper bound of the epsilon spent so far, at ``delta``.

        alphas: the orders, of which the best is taken; ours if None.
        """
        if alphas is None:
            return super().get_epsilon(delta)
        accountant = RdpAccountant(alphas)
        for statement, steps in self.accountant.history:
            accountant.compose(statement, steps)
        return accountant.epsilon(delta)

    @classmethod
    def mechanism(cls) -> str:
        """Return ``rdp``."""
        return "rdp"
