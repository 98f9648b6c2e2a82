"""Which way local training of a round's clients is computed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpkernels.federated.local.chain import Chain, chain_of
from dpkernels.federated.local.network import network_of
from dpkernels.federated.local.vmapped import unmapped
from dpkernels.federated.problem import LocalSGD
from dpkernels.ops.network_sgd import Layer, Window, is_compiled

Way = Literal["stacked", "chained", "vmapped", "looped"]


@dataclass(frozen=True)
class Plan:
    """How local training is computed.

    way: ``stacked`` (one product per layer for all clients), ``chained`` (compiled code, a client
        in each thread), ``vmapped`` (``torch.func`` over clients), or ``looped`` (one client after
        the other, by autograd).
    reason: why, for people. chain: of a stacked model. network: of a chained one.
    spanned: whether the first layer is kept as coefficients of the records (``gram.py``).
    """

    way: Way
    reason: str
    chain: Chain = ()
    network: tuple[Layer, ...] = ()
    spanned: bool = False

    def __str__(self) -> str:
        return f"{self.way}: {self.reason}"


def plan_of(
    model: nn.Module,
    record: tuple[int, ...],
    local: LocalSGD,
    counts: list[int],
    *,
    asked: Way | None = None,
    cross_entropy: bool = True,
    grams_kept: bool = True,
) -> Plan:
    """Return the way for clients with ``counts`` records of shape ``record`` each.

    asked: a way to take whatever is faster. cross_entropy: whether the loss is that, summed.
    grams_kept: whether products of records are kept between rounds.

    Raises ValueError for a way that the model does not allow.
    """
    ways = get_args(Way)
    if asked is not None and asked not in ways:
        raise ValueError(f"plan_of: asked must be one of {', '.join(ways)}, got {asked!r}")
    other = "the loss is not the summed cross-entropy"
    chain = chain_of(model, record) if cross_entropy else other
    network = _network(model, record) if cross_entropy else other
    reasons = {
        "stacked": chain,
        "chained": network,
        "vmapped": unmapped(model) if cross_entropy else other,
    }
    why_not = {way: why for way, why in reasons.items() if isinstance(why, str)}
    possible = [way for way in ways if way not in why_not]
    if asked is not None and asked not in possible:
        raise ValueError(
            f"plan_of: {asked} does not take this model: {why_not[asked]}; it can be "
            f"{', '.join(possible)}"
        )
    if isinstance(chain, tuple) and asked in (None, "stacked"):
        spanned, why = _spanned(chain, local, counts, grams_kept)
        reason = f"a chain of linear layers, one product each; {why}"
        return Plan("stacked", reason, chain, spanned=spanned)
    if isinstance(network, tuple):
        dense = _dense(network)
        if asked == "chained" or (asked is None and dense is None):
            return Plan("chained", _CHAINED, network=network)
        why_not["chained"] = str(dense)
    if asked is not None:
        return Plan(asked, "asked for")
    if "vmapped" in possible:
        plan = _mapped_or_looped(model, record, local, counts)
        return Plan(plan.way, f"not chained: {why_not['chained']}; {plan.reason}")
    all_of_them = "; ".join(dict.fromkeys(why_not.values()))
    return Plan("looped", f"not stacked, chained or mapped: {all_of_them}")


_CHAINED = "convolutions, then linear layers, in a row: compiled, a client in each thread"


def _dense(network: tuple[Layer, ...]) -> str | None:
    """Return why compiled code would be no faster: it gains by what comes back as zero.

    The loop's time over the chained one's, two convolutions of 32 channels, batch 16, one core of
    a busy machine, medians of 9 interleaved: ReLU and pool 4.8, pool 4.1, tanh and pool 2.4, ReLU
    1.6 (with 64 channels 1.05), neither 0.9, tanh 0.5.
    """
    for layer in network:
        if layer.kind == "convolution" and layer.activation != "relu" and layer.pool == Window():
            return "a Conv2d has neither ReLU nor a pool after it: all of its gradient comes back"
    return None


def _network(model: nn.Module, record: tuple[int, ...]) -> tuple[Layer, ...] | str:
    like = next(model.parameters(), None)
    if like is None or not _compiled(like):
        return "there is no compiled code for its parameters"
    return network_of(model, record)


def _compiled(like: Tensor) -> bool:
    return like.device.type == "cpu" and is_compiled(like)


# Without compiled code, gathering rows of K takes 7% of the product's time at n = 500 while the
# machine is idle, and 40% while others use its cache. Between them; not tuned.
_SPAN_OVERHEAD = 1.25


def _spanned(chain: Chain, local: LocalSGD, counts: list[int], kept: bool) -> tuple[bool, str]:
    """Return whether the first layer is kept in the span of the records: if that is fewer flops.

    Flops of a round, over records and outputs of the layer: 4 d E with weights; 2 n E + 4 d with
    coefficients, and 2 n d / h more if K is not kept.
    """
    first, epochs, most = chain[0], local.epochs, max(counts, default=0)
    if len(chain) == 1 or first.before:
        return False, "first layer by its weights: K does not hold for what it takes or puts out"
    direct = 4.0 * first.inputs * epochs
    span = 2.0 * most * epochs + 4.0 * first.inputs
    if not kept:
        span += 2.0 * most * first.inputs / first.outputs
    ratio = direct / span
    if ratio <= _SPAN_OVERHEAD:
        return False, f"first layer by its weights: coefficients would save {ratio:.2f}x flops"
    uncompiled = (
        "; compiled epochs have no momentum: PyTorch's operations" if local.momentum else ""
    )
    return True, (
        f"first layer by coefficients of at most {most} records: {ratio:.1f}x fewer flops in "
        f"{epochs} epochs than by {first.inputs} features{uncompiled}"
    )


# Ten clients on one core, by flops of a client's step (forward and backward), the loop's time over
# the mapped one's: LeNet of 45 k parameters 3.8 at 3 MFlop (batch 2), 1.2 at 13 M (batch 8), 0.9 at
# 53 M (batch 32); LeNet-5 of the FedCEO paper 0.8 at 480 M (batch 10). One run each, on a busy
# machine: the crossing is known to a factor of about 4. At 3 GFlop (batch 64): 0.53, interleaved.
_MAPPED_FLOPS = 2e7


def _mapped_or_looped(
    model: nn.Module, record: tuple[int, ...], local: LocalSGD, counts: list[int]
) -> Plan:
    """Return mapped if calls cost more than flops do; one pass of one record counts these."""
    clients = sum(count > 0 for count in counts)
    if clients < 2:
        return Plan("looped", "one client")
    flops = 3.0 * _forward_flops(model, record) * min(local.batch_size, max(counts))
    seen = f"{flops / 1e6:.3g} MFlop in a client's step"
    if flops <= _MAPPED_FLOPS:
        return Plan("vmapped", f"{seen}: calls cost more than flops, and are shared by {clients}")
    return Plan("looped", f"{seen}: above {_MAPPED_FLOPS / 1e6:.0f} M a pass for all is no faster")


def _forward_flops(model: nn.Module, record: tuple[int, ...]) -> int:
    like = next(model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, *record, dtype=like.dtype, device=like.device))
    return int(counter.get_total_flops())
