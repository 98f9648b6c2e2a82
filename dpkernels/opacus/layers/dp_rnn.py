"""``DPRNN``, ``DPGRU`` and ``DPLSTM``: torch's layers with the arguments that Opacus' take.

Nothing is computed here: the engine has a rule for torch's own recurrent layers, and parameters and
``state_dict`` have torch's names, as Opacus' have.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# What Opacus calls weight_ih_l0 in its modules: it writes both names.
_CELL_NAME = re.compile(r"(l\d+(?:_reverse)?)\.(ih|hh)\.(weight|bias)")


class _Recurrent(nn.RNNBase):
    """Takes the initial state as ``state_init``, too, and loads what Opacus has saved.

    The engine knows a layer by its ``forward``, so the name is translated before that is called.
    """

    def __call__(self, input: Any, state_init: Any = None, *, hx: Any = None) -> Any:
        return super().__call__(input, hx if state_init is None else state_init)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in list(state_dict):
            if found := _CELL_NAME.fullmatch(name.removeprefix(prefix)):
                cell, matrix, kind = found.groups()
                state_dict.setdefault(f"{prefix}{kind}_{matrix}_{cell}", state_dict.pop(name))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class DPRNN(_Recurrent, nn.RNN):
    """``torch.nn.RNN`` with the arguments of Opacus' ``DPRNN``, in their order."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
    ) -> None:
        _check_unprojected("DPRNN", proj_size)
        nn.RNN.__init__(
            self,
            input_size,
            hidden_size,
            num_layers,
            nonlinearity,
            bias,
            batch_first,
            dropout,
            bidirectional,
        )


class DPGRU(_Recurrent, nn.GRU):
    """``torch.nn.GRU`` with the arguments of Opacus' ``DPGRU``, in their order."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
    ) -> None:
        _check_unprojected("DPGRU", proj_size)
        nn.GRU.__init__(
            self, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        )


class DPLSTM(_Recurrent, nn.LSTM):
    """``torch.nn.LSTM``, which takes the arguments of Opacus' ``DPLSTM`` as it is."""


def _check_unprojected(layer: str, proj_size: int) -> None:
    if proj_size != 0:
        raise ValueError(f"{layer}: proj_size must be 0, got {proj_size}; only an LSTM projects")
