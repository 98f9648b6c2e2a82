"""FedFisher with diagonal Fishers from three sums over clients, which a secure aggregation can add.

Every client sends ``p_i F_i``, ``p_i F_i * W_i`` and ``p_i W_i``, element by element. The server
needs their sums only: ``F = sum_i p_i F_i``, half the gradient ``F * W - sum_i p_i F_i * W_i``, and
the start ``sum_i p_i W_i``. A sum of Kronecker products is none, so K-FAC has no such form.

Who sees what, if the aggregation holds: the server the three sums, the number of clients and their
p_i; a client its own model and the merged one. Nobody sees another's model or Fisher. Nothing here
is differentially private: the sums themselves tell of records, and of a single client's where the
others work together or there are none. Non-finite numbers of one client spoil the sums of all, so
``client_sums`` refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.federated.merging.blocks import Block, blocks_of
from dpkernels.federated.merging.merge import DEFAULT_SOLVER, Merged, minimised
from dpkernels.federated.merging.quadratic import Quadratic, shifts_of
from dpkernels.federated.merging.solvers import Solver
from dpkernels.federated.merging.states import Score, State, check_finite_states
from dpkernels.fisher import Diagonal, Fisher
from dpkernels.ops.checks import check_finite


@dataclass(frozen=True)
class Sums:
    """The three vectors, by parameter: of one client, or added up.

    fisher: ``p F``. moment: ``p F * W``. Both of the parameters that have an F.
    state: ``p W`` of every tensor of floating point.
    dtypes: that the merged model's tensors are to have.
    """

    fisher: dict[str, Tensor]
    moment: dict[str, Tensor]
    state: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]


def client_sums(state: State, fisher: Fisher, weight: float) -> Sums:
    """Return what a client adds: in float32, or float64 where its weights are.

    weight: p_i, the client's share, public. Raises ValueError for a Fisher of K-FAC, for one that
    does not fit the state, and for numbers that are not finite.
    """
    check_finite("client_sums", "weight", weight, at_least=0.0)
    blocks, factors = blocks_of([state], [fisher], [0])
    check_finite_states([state], [0])
    kept = {name: x.detach() for name, x in state.items() if x.is_floating_point()}
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in kept.items()}
    sums = Sums({}, {}, {}, {name: x.dtype for name, x in kept.items()})
    for block, (layer,) in zip(blocks, factors, strict=True):
        if not isinstance(layer, Diagonal):
            raise ValueError(
                f"client_sums: sums over clients need diagonal Fishers, got K-FAC of "
                f"{' and '.join(block.parameters)}; take fisher_information(kind='diagonal'), or "
                "merge without secure aggregation"
            )
        name = layer.parameter
        sums.fisher[name] = layer.values.to(wide[name].dtype) * weight
        sums.moment[name] = sums.fisher[name] * wide[name]
    sums.state.update({name: x * weight for name, x in wide.items()})
    return sums


def add_sums(uploads: Iterable[Sums]) -> Sums:
    """Return the sums of all uploads: what secure aggregation computes, here in the open.

    Raises ValueError for uploads of other parameters or shapes than the first.
    """
    total: Sums | None = None
    for number, upload in enumerate(uploads):
        if total is None:
            fisher, moment, state = (
                {name: tensor.clone() for name, tensor in part.items()} for part in _parts(upload)
            )
            total = Sums(fisher, moment, state, upload.dtypes)
            continue
        for into, part in zip(_parts(total), _parts(upload), strict=True):
            if _shapes(into) != _shapes(part):
                raise ValueError(
                    f"add_sums: upload {number} must have the parameters and shapes of the first"
                )
            for name, tensor in part.items():
                into[name] += tensor
    if total is None:
        raise ValueError("add_sums: uploads must have at least one client's, got none")
    return total


def merge_sums(
    total: Sums,
    *,
    weight: float = 1.0,
    public: State | None = None,
    solver: Solver = DEFAULT_SOLVER,
    damping: float = 0.0,
    choose: Score | None = None,
) -> Merged:
    """Return ``merge(method="fedfisher")`` of diagonal Fishers, from the three sums; to rounding.

    weight: the sum of the p_i: 1, or the number of all records where clients took their own.
    public: where tensors come from that have no sum (of integers or bool), such as the public
        starting model; None: the merged state lacks them.
    solver, damping, choose: as for ``merge``. ``values`` are less the one at the start, which is
        not among the sums.
    """
    check_finite("merge_sums", "weight", weight, above=0.0)
    check_finite("merge_sums", "damping", damping, at_least=0.0)
    start = {name: x.double() / weight for name, x in total.state.items()}
    like = {name: x.to(total.dtypes[name]) for name, x in total.state.items()}
    for name, tensor in ({} if public is None else public).items():
        if name not in start and not tensor.is_floating_point():
            start[name] = like[name] = tensor.detach().clone()
    fs = [x / weight for x in total.fisher.values()]
    pairs = zip(fs, total.moment.items(), strict=True)
    residual = [(x.double() / weight - f * start[name]).to(f.dtype) for f, (name, x) in pairs]
    blocks = [Block(name, None, False, tuple(x.shape)) for name, x in total.fisher.items()]
    objective = Quadratic([], [], fs, residual, 0.0, shifts_of([], [], fs, damping))
    return minimised(start, like, blocks, objective, solver, choose)


def _parts(sums: Sums) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    return sums.fisher, sums.moment, sums.state


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
