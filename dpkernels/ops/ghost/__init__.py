"""Ghost clipping: norms and clipped sums of per-sample gradients from activations and errors.

Every layer kind has ``<layer>_norms``, whose result has a method ``weighted_sum``; the two are
apart because flat clipping needs the norms of all layers before the first sum. ``<layer>_plan``
tells which formula runs and what it costs, ``<layer>_clip_and_sum`` does one layer in one call.
"""

from dpkernels.ops.ghost.conv import ConvNorms, conv_clip_and_sum, conv_norms, conv_plan
from dpkernels.ops.ghost.embedding import (
    EmbeddingNorms,
    embedding_clip_and_sum,
    embedding_norms,
    embedding_plan,
)
from dpkernels.ops.ghost.layer import LayerSum
from dpkernels.ops.ghost.linear import LinearNorms, linear_clip_and_sum, linear_norms
from dpkernels.ops.ghost.linear_plan import linear_plan
from dpkernels.ops.ghost.plan import Plan
from dpkernels.ops.ghost.scale_shift import (
    ScaleShiftNorms,
    scale_shift_clip_and_sum,
    scale_shift_norms,
    scale_shift_plan,
)

__all__ = [
    "ConvNorms",
    "EmbeddingNorms",
    "LayerSum",
    "LinearNorms",
    "Plan",
    "ScaleShiftNorms",
    "conv_clip_and_sum",
    "conv_norms",
    "conv_plan",
    "embedding_clip_and_sum",
    "embedding_norms",
    "embedding_plan",
    "linear_clip_and_sum",
    "linear_norms",
    "linear_plan",
    "scale_shift_clip_and_sum",
    "scale_shift_norms",
    "scale_shift_plan",
]
