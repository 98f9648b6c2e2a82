"""``RDPAccountant``: Renyi differential privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dpkernels.opacus.accountants.statements import StatementAccountant
from dpkernels.privacy.accountants import RdpAccountant
from dpkernels.privacy.accountants.rdp import ORDERS


class RDPAccountant(StatementAccountant):
    """Renyi differential privacy, over more orders than Opacus takes."""

    name = "rdp"
    DEFAULT_ALPHAS: ClassVar[list[float]] = list(ORDERS)

    def get_epsilon(
        self, delta: float, alphas: Sequence[float] | None = None, **kwargs: Any
    ) -> float:
        """Return an upper bound of the epsilon spent so far, at ``delta``.

        alphas: the orders, of which the best is taken; ours if None.
        """
        if alphas is None:
            return super().get_epsilon(delta)
        return self._at(alphas).epsilon(delta)

    def get_privacy_spent(
        self, *, delta: float, alphas: Sequence[float] | None = None
    ) -> tuple[float, float]:
        """Return epsilon as ``get_epsilon`` does, and the order that gives it; 0 and 0 before that.

        alphas: the orders; ours if None.
        """
        if len(self) == 0:
            return 0.0, 0.0
        orders = ORDERS if alphas is None else alphas
        epsilon = self.get_epsilon(delta, alphas)
        return epsilon, min(orders, key=lambda order: self._at([order]).epsilon(delta))

    def _at(self, orders: Sequence[float]) -> RdpAccountant:
        """Return an accountant of the same steps that knows these orders only."""
        accountant = RdpAccountant(orders)
        for statement, steps in self.accountant.history:
            accountant.compose(statement, steps)
        return accountant

    @classmethod
    def mechanism(cls) -> str:
        """Return ``rdp``."""
        return "rdp"
