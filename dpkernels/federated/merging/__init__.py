"""One-shot federation: merge models that were trained apart, in one round.

``merge`` is the whole of it; ``secure_sums`` has the form that never shows the server one client's
model. None of it is differentially private.
"""

from dpkernels.federated.merging.merge import Merged, Method, merge
from dpkernels.federated.merging.secure_sums import Sums, add_sums, client_sums, merge_sums
from dpkernels.federated.merging.solvers import Adam, ConjugateGradients, GradientDescent, Solver

__all__ = [
    "Adam",
    "ConjugateGradients",
    "GradientDescent",
    "Merged",
    "Method",
    "Solver",
    "Sums",
    "add_sums",
    "client_sums",
    "merge",
    "merge_sums",
]
