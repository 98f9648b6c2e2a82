"""Uploads in every form that Tables 4 and 5 compare: really packed, and unpacked again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from dpkernels.federated.merging.compress import compress, decompress
from dpkernels.federated.merging.layout import Layout
from dpkernels.fisher import Fisher, Kronecker

# ``paper-2`` and ``paper-6``: the paper's with other factors s_q for K-FAC's singular vectors.
Form = Literal["none", "paper", "symmetric", "paper-2", "paper-6"]
Sent = tuple[dict[str, Tensor], Fisher]


def sent(state: Mapping[str, Tensor], fisher: Fisher, form: Form) -> tuple[Sent, int]:
    """Return what the server unpacks of an upload, and the bytes that it took.

    The budget is FedAvg's: 4 bytes for each value of the state. Layouts are the server's already:
    neither names nor shapes are counted, as in the paper.
    """
    if form == "none":
        plain = sum(4 * tensor.numel() for tensor in state.values())
        return (dict(state), fisher), plain + fisher_bytes(fisher)
    layout = Layout.of(state, fisher)
    kind, _, s_q = form.partition("-")
    upload = compress(
        state,
        fisher,
        form="symmetric" if kind == "symmetric" else "paper",
        layout=layout,
        s_q=int(s_q) if s_q else None,
    )
    return decompress(upload.payload, layout=layout), upload.bytes


def fisher_bytes(fisher: Fisher) -> int:
    """Return what F costs in float32, matrices whole."""
    found = 0
    for layer in fisher.layers.values():
        tensors = (layer.a, layer.g) if isinstance(layer, Kronecker) else (layer.values,)
        found += sum(4 * tensor.numel() for tensor in tensors)
    return found
