"""``two_layer_epoch_``: one local epoch of 10 clients, MLP with 64 hidden units.

A record takes 2 n h flops in the span of its client's n records and 6 h classes in the second
layer. K, 4 n^2 bytes a client, is read once in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.registry import Case, Form, Inputs, Outputs, Target
from dpkernels.ops.local_sgd import two_layer_epoch_
from dpkernels.ops.local_sgd.reference import two_layer_epoch_ as plain_epoch

CLIENTS, HIDDEN, CLASSES, BATCH = 10, 64, 26, 64
LOOP = "addmm, client by client"


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield clients of 200 and 500 records."""
    for records in (70,) if quick else (200, 500):
        yield _case(records)


def _case(records: int) -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = torch.randn(CLIENTS, records, 32, generator=generator, device=device) / 8
        orders = torch.rand(CLIENTS, records, generator=generator, device=device).argsort(1)
        kept = torch.rand(CLIENTS, records, HIDDEN, generator=generator, device=device) < 0.5
        labels = torch.rand(CLIENTS, records, generator=generator, device=device) * CLASSES
        return [
            torch.zeros(CLIENTS, records, HIDDEN, device=device),
            torch.randn(CLIENTS, CLASSES, HIDDEN, generator=generator, device=device) / 8,
            x @ x.mT,
            torch.randn(CLIENTS, records, HIDDEN, generator=generator, device=device),
            orders,
            labels.long(),
            2.0 * kept,
        ]

    def arguments(inputs: Inputs) -> tuple[object, ...]:
        return inputs, [torch.empty_like(t) for t in inputs[:2]]

    def ours(inputs: Inputs, outputs: Outputs) -> Outputs:
        torch._foreach_copy_(outputs, inputs[:2])
        gram, start, order, labels, mask = inputs[2:]
        two_layer_epoch_(
            outputs[0],
            outputs[1],
            None,
            None,
            grams=gram.unbind(0),
            start=start,
            order=order,
            labels=labels,
            mask=mask,
            counts=[records] * CLIENTS,
            batch_size=BATCH,
            lr=0.1,
        )
        return outputs

    def plain(inputs: Inputs, outputs: Outputs) -> Outputs:
        torch._foreach_copy_(outputs, inputs[:2])
        gram, start, order, labels, mask = inputs[2:]
        grams, counts = list(gram.unbind(0)), [records] * CLIENTS
        tables = start, order, labels, mask
        plain_epoch(outputs[0], outputs[1], None, None, grams, *tables, counts, BATCH, 0.1)
        return outputs

    def truth(inputs: Inputs) -> Outputs:
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        return plain(wide, [torch.empty_like(t) for t in wide[:2]])

    flops = CLIENTS * records * (2 * records * HIDDEN + 6 * HIDDEN * CLASSES)
    return Case(
        op="two_layer_epoch_",
        name=f"local epoch, {records} records a client",
        dtype=torch.float32,
        parameters={"clients": CLIENTS, "records": records, "hidden": HIDDEN, "classes": CLASSES},
        make_inputs=make_inputs,
        bytes_moved=4 * CLIENTS * records * (records + 4 * HIDDEN),
        flops=flops,
        bound="gemm",
        ours=Form("dpkernels", ours, arguments, compilable=False),
        plain=(Form(LOOP, plain, arguments, compilable=False),),
        truth=truth,
        target=Target(1.5, LOOP),
    )
