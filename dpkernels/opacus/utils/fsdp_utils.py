"""``FSDP2Wrapper``: parameters sharded over processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def FSDP2Wrapper(model: nn.Module, **kwargs: Any) -> nn.Module:  # noqa: N802
    """Return ``model`` with every module that has parameters of its own sharded, and itself.

    kwargs: ``mp_policy``, for all modules but those of the classes in
        ``opacus_high_precision_layers``, which keep the default dtype.
    """
    policy = kwargs.get("mp_policy", MixedPrecisionPolicy())
    exempt = tuple(kwargs.get("opacus_high_precision_layers", ()))
    high = MixedPrecisionPolicy(param_dtype=torch.get_default_dtype())
    for module in model.modules():
        if module is not model and any(True for _ in module.parameters(recurse=False)):
            fully_shard(module, mp_policy=high if isinstance(module, exempt) else policy)
    fully_shard(model, mp_policy=policy)
    return model
