"""Inverses of a matrix plus rank-one terms (Sherman-Morrison, Woodbury), never formed.

``sofim_step_``               one step of DP-FedSOFIM over all parameters, two passes over memory.
``rank_one_inverse_update_``  ``(A + u v^T)^-1`` from ``A^-1``, in place.
``woodbury_solve``            ``(rho I + sum_i u_i v_i^T)^-1 g`` from the vectors alone.
``GradientWindow``            the same for the last k gradients, their Gram matrix kept current.

All of this acts on what was released already (post-processing): no data is touched here. Dot
products over parameters are summed in float64 whatever the dtype, the same for any number of
threads.
"""

from dpkernels.ops.sherman_morrison.inverse import rank_one_inverse_update_
from dpkernels.ops.sherman_morrison.step import SofimStep, sofim_step_
from dpkernels.ops.sherman_morrison.window import GradientWindow, woodbury_solve

__all__ = [
    "GradientWindow",
    "SofimStep",
    "rank_one_inverse_update_",
    "sofim_step_",
    "woodbury_solve",
]
