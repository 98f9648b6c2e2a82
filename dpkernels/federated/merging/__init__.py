"""One-shot federation: merge models that were trained apart, in one round.

``merge`` is the whole of it; ``secure_sums`` has the form that never shows the server one client's
model, and ``compress`` what a client sends for no more bytes than its model alone. Baselines that
match units or distil are in ``ot_fusion``, ``pfnm`` and ``dense``. None of it is differentially
private.
"""

from dpkernels.federated.merging.compress import Upload, compress, decompress
from dpkernels.federated.merging.layout import Layout
from dpkernels.federated.merging.merge import Merged, Method, merge
from dpkernels.federated.merging.secure_sums import Sums, add_sums, client_sums, merge_sums
from dpkernels.federated.merging.solvers import Adam, ConjugateGradients, GradientDescent, Solver

__all__ = [
    "Adam",
    "ConjugateGradients",
    "GradientDescent",
    "Layout",
    "Merged",
    "Method",
    "Solver",
    "Sums",
    "Upload",
    "add_sums",
    "client_sums",
    "compress",
    "decompress",
    "merge",
    "merge_sums",
]
