"""``DPMultiheadAttention``: torch's attention under Opacus' name."""

from __future__ import annotations

from torch import nn


class DPMultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``, which takes the arguments of Opacus' as it is.

    The engine has a rule for it. Parameters are torch's (``in_proj_weight``, ...), which are the
    names that Opacus' writes to a ``state_dict``, too. Masks that Opacus refuses (``is_causal``,
    boolean masks of any kind) work as torch's do.
    """
