"""Preconditioners: which operator goes onto the gradients of which layer, before they are clipped.

A preconditioner may depend on synthetic or public data and on released parameters, never on the
batch that it is applied to.
"""

from dpkernels.engine.sides import IDENTITY, FixedSides, Preconditioner, Sides

__all__ = ["IDENTITY", "FixedSides", "Preconditioner", "Sides"]
