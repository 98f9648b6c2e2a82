"""Uploads in every form that Tables 4 and 5 compare: really packed, and unpacked again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from dpkernels.fisher import Diagonal, Fisher, Kronecker

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
    if form == "paper-2" or form == "paper-6":
        return _with_factors(state, fisher, int(form.removeprefix("paper-")))
    from dpkernels.federated.merging.compress import compress, decompress
    from dpkernels.federated.merging.layout import Layout

    layout = Layout.of(state, fisher)
    upload = compress(state, fisher, form=form, layout=layout)
    return decompress(upload.payload, layout=layout), upload.bytes


def fisher_bytes(fisher: Fisher) -> int:
    """Return what F costs in float32, matrices whole."""
    found = 0
    for layer in fisher.layers.values():
        tensors = (layer.a, layer.g) if isinstance(layer, Kronecker) else (layer.values,)
        found += sum(4 * tensor.numel() for tensor in tensors)
    return found


def paper_rank(state: Mapping[str, Tensor], fisher: Fisher, s_q: int) -> int:
    """Return l_v: the largest with (32/s_q) sum_l (2 m_{l-1} + 2 m_l + 2) l_v <= 16 d (App. C)."""
    from dpkernels.federated.merging.quantise import paper_bits

    values = sum(tensor.numel() for tensor in state.values())
    each = sum(2 * (len(layer.a) + len(layer.g)) + 2 for layer in _factors(fisher).values())
    return max(1, 16 * values // (paper_bits(s_q) * each))


def _with_factors(state: Mapping[str, Tensor], fisher: Fisher, s_q: int) -> tuple[Sent, int]:
    """Return K-FAC by the paper's truncated SVD of l_v and s_q, weights at s_q = 2."""
    from dpkernels.federated.merging.low_rank import TruncatedSvd
    from dpkernels.federated.merging.packing import Reader
    from dpkernels.federated.merging.quantise import Uniform, paper_bits

    rank, bits, size = paper_rank(state, fisher, s_q), paper_bits(s_q), 0

    def through(part: Uniform | TruncatedSvd, x: Tensor) -> Tensor:
        nonlocal size
        payload = part.encode(x)
        size += len(payload)
        return part.decode(Reader(payload)).to(x.dtype)

    weights = {
        name: through(Uniform(tuple(tensor.shape), paper_bits(2), rows=False), tensor)
        for name, tensor in state.items()
    }
    layers: dict[str, Kronecker | Diagonal] = {}
    for name, layer in _factors(fisher).items():
        a, g = (through(TruncatedSvd(len(x), rank, bits), x) for x in (layer.a, layer.g))
        layers[name] = Kronecker(layer.weight, layer.bias, a, g)
    return (weights, Fisher(layers, dict(fisher.without), fisher.records)), size


def _factors(fisher: Fisher) -> dict[str, Kronecker]:
    found = {name: one for name, one in fisher.layers.items() if isinstance(one, Kronecker)}
    if len(found) != len(fisher.layers):
        raise ValueError("forms: paper-2 and paper-6 are of K-FAC, got a diagonal")
    return found
