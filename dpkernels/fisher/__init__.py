"""Fisher information of trained models."""

from dpkernels.fisher.information import Diagonal, Fisher, Kronecker

__all__ = ["Diagonal", "Fisher", "Kronecker"]
