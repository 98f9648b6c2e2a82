"""``network_epoch_``: one local epoch of 4 clients, batch 64: FedCEO's LeNet-5, FedFisher's LeNet.

Flops are those of dense passes, forward and backward, less the records' gradients: compiled code
leaves out what a max-pooling and ReLU set to zero. Weights are read twice and written once a step;
what the last step was, with momentum, read and written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.registry import Case, Form, Inputs, Outputs, Target
from dpkernels.federated.local import network_of
from dpkernels.federated.models import lenet, lenet5
from dpkernels.ops.network_sgd import network_epoch_
from dpkernels.ops.network_sgd.reference import network_epoch_ as plain_epoch

CLIENTS, CLASSES, BATCH = 4, 10, 64
LOOP = "autograd, client by client"


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield clients of 128 records, plain SGD and with momentum."""
    records = 8 if quick else 128
    yield _case("LeNet-5", lenet5(CLASSES), (3, 32, 32), records, 0.0)
    yield _case("LeNet", lenet(CLASSES), (1, 28, 28), records, 0.9)


def _case(
    name: str, model: nn.Module, image: tuple[int, int, int], records: int, momentum: float
) -> Case:
    layers = network_of(model, image)
    assert not isinstance(layers, str)
    numbers = [number for layer in layers for number in layer.numbers()]
    size = sum(p.numel() for p in model.parameters())
    counts = [records] * CLIENTS

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        total = CLIENTS * records
        order = torch.rand(CLIENTS, records, generator=generator, device=device).argsort(1)
        first = torch.arange(CLIENTS, device=device).unsqueeze(1) * records
        labels = torch.rand(CLIENTS, records, generator=generator, device=device) * CLASSES
        return [
            torch.randn(1, size, generator=generator, device=device) / 30,
            torch.rand(total, math.prod(image), generator=generator, device=device),
            order + first,
            labels.long(),
        ]

    def written(inputs: Inputs) -> Outputs:
        return [inputs[0].new_empty(CLIENTS, size) for _ in range(2 if momentum else 1)]

    def arguments(inputs: Inputs) -> tuple[object, ...]:
        return inputs, written(inputs)

    def ours(inputs: Inputs, outputs: Outputs) -> Outputs:
        theta, images, rows, labels = inputs
        network_epoch_(
            outputs[0],
            theta,
            records=images,
            rows=rows,
            labels=labels,
            counts=counts,
            masks=[],
            layers=layers,
            batch_size=BATCH,
            lr=0.01,
            momentum=momentum,
            velocity=outputs[1] if momentum else None,
        )
        return outputs

    def plain(inputs: Inputs, outputs: Outputs) -> Outputs:
        theta, images, rows, labels = inputs
        tables = theta, images, rows, labels
        velocity = outputs[1] if momentum else None
        rates = BATCH, 0.01, momentum
        plain_epoch(outputs[0], velocity, *tables, counts, [], numbers, *rates, True, True)
        return outputs

    def truth(inputs: Inputs) -> Outputs:
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        return plain(wide, written(wide))

    forward = sum(
        2 * layer.outputs * layer.image[0] * rows * columns * layer.kernel.size[0] ** 2
        for layer in layers
        for rows, columns in [layer.kernel.over(layer.image[1:])]
    )
    below, (rows, columns) = layers[0], layers[0].kernel.over(image[1:])
    first = 2 * below.outputs * below.image[0] * rows * columns * below.kernel.size[0] ** 2
    steps = CLIENTS * -(-records // BATCH)
    return Case(
        op="network_epoch_",
        name=f"local epoch of {name}, {records} records a client",
        dtype=torch.float32,
        parameters={
            "clients": CLIENTS,
            "records": records,
            "classes": CLASSES,
            "batch": BATCH,
            "momentum": momentum,
        },
        make_inputs=make_inputs,
        bytes_moved=4 * (5 if momentum else 3) * size * steps,
        flops=CLIENTS * records * (3 * forward - first),
        bound="gemm",
        ours=Form("dpkernels", ours, arguments, compilable=False),
        plain=(Form(LOOP, plain, arguments, compilable=False),),
        truth=truth,
        target=Target(1.5, LOOP),
    )
