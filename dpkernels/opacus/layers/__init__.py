"""Recurrent layers and attention under Opacus' names: torch's own, which the engine follows."""

from dpkernels.opacus.layers.dp_multihead_attention import DPMultiheadAttention, SequenceBias
from dpkernels.opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention", "SequenceBias"]
