"""The operations, one folder each: public function, plain-PyTorch reference, Triton kernels.

Importing this package registers every operation's schema and what implements it.
"""

from dpkernels.ops import (
    clip,
    ghost,
    glm,
    kron,
    kron_sum,
    local_sgd,
    network_sgd,
    noise,
    roots,
    sherman_morrison,
    tsvd,
)

__all__ = [
    "clip",
    "ghost",
    "glm",
    "kron",
    "kron_sum",
    "local_sgd",
    "network_sgd",
    "noise",
    "roots",
    "sherman_morrison",
    "tsvd",
]
