"""``noise``: Gaussian noise added to buffers and rows, against PyTorch's own generator.

n float32 elements are read and written once: 2 * 4 * n bytes, and 16 bytes for each row's key and
counter. About 60 flops an element (Philox 20 multiplications, Box-Muller the rest). Plain PyTorch
draws the noise of all rows from one generator, which is faster than one for each client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, Target
from dpkernels.ops.noise import add_gaussian_noise_, add_row_noise_, reference

FLOPS_PER_ELEMENT = 60
STD = 0.5
# Nothing is protected here, so key and counter may be fixed and used again in every round.
KEY = 0x0123_4567_89AB_CDEF
COUNTER = 7

# Weights and biases of a 784-512-384-128-128-64-10 perceptron: 673,610 values.
MODEL = (401_408, 512, 196_608, 384, 49_152, 128, 16_384, 128, 8_192, 64, 640, 10)

# Uploads of 500 clients: a linear model of 64 features and 10 classes.
CLIENTS, WIDTH = 500, 640

AGAINST = "torch.randn, add_"


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield buffers of 10 M and 670 k values, a model's twelve buffers, and 500 clients' rows."""
    if not quick:
        yield _buffers("noise 10,000,000", (10_000_000,), device, Target(5.0, AGAINST))
    yield _buffers("noise 670,000", (670_000,), device, Target(4.0, AGAINST))
    yield _buffers(f"noise 12 buffers, {sum(MODEL):,}", MODEL, device, Target())
    yield _rows(f"noise {CLIENTS} rows of {WIDTH}", device, Target(4.0, AGAINST))


def _buffers(name: str, sizes: tuple[int, ...], device: torch.device, target: Target) -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return [torch.randn(size, generator=generator, device=device) for size in sizes]

    def same_dtype(inputs: Inputs) -> Outputs:
        xs = _copies(inputs)
        reference.add_gaussian_noise_(xs, STD, KEY, COUNTER, 1.0)
        return xs

    def ours(xs: list[Tensor]) -> Outputs:
        add_gaussian_noise_(xs, STD, KEY, COUNTER)
        return xs

    n = sum(sizes)
    return Case(
        op="add_gaussian_noise_",
        name=name,
        parameters={"sizes": list(sizes), "std": STD},
        make_inputs=make_inputs,
        bytes_moved=2 * 4 * n,
        ours=Form("dpkernels", ours, lambda inputs: (_copies(inputs),)),
        truth=_truth,
        same_dtype=same_dtype,
        target=target,
        **_shared(n, device),
    )


def _rows(name: str, device: torch.device, target: Target) -> Case:
    """One buffer, whose rows are the clients'."""
    n = CLIENTS * WIDTH
    keys = KEY + torch.arange(CLIENTS)
    counters = COUNTER + 3 * torch.arange(CLIENTS)

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return [torch.randn(n, generator=generator, device=device)]

    def truth(inputs: Inputs) -> Outputs:
        streams = keys.to(inputs[0].device), counters.to(inputs[0].device)
        z = reference.standard_normals(WIDTH, *streams, inputs[0].device, torch.float64)
        return [inputs[0].double() + STD * z.flatten()]

    def same_dtype(inputs: Inputs) -> Outputs:
        x = inputs[0].clone()
        reference.add_row_noise_(x.view(CLIENTS, WIDTH), STD, keys, counters, 1.0)
        return [x]

    def ours(x: Tensor, rows: Tensor) -> Outputs:
        add_row_noise_(rows, STD, keys, counters)
        return [x]

    def arguments(inputs: Inputs) -> tuple[Tensor, Tensor]:
        x = inputs[0].clone()
        return x, x.view(CLIENTS, WIDTH)

    return Case(
        op="add_row_noise_",
        name=name,
        parameters={"rows": CLIENTS, "width": WIDTH, "std": STD},
        make_inputs=make_inputs,
        bytes_moved=2 * 4 * n + 16 * CLIENTS,
        ours=Form("dpkernels", ours, arguments),
        truth=truth,
        same_dtype=same_dtype,
        target=target,
        **_shared(n, device),
    )


def _shared(n: int, device: torch.device) -> dict[str, Any]:
    """Return what every case of n elements has."""
    return {
        "dtype": torch.float32,
        "flops": FLOPS_PER_ELEMENT * n,
        "bound": "update",
        "plain": _plain_forms(n, device),
        "check_plain": _looks_normal,
    }


def _copies(inputs: Inputs) -> list[Tensor]:
    return [x.clone() for x in inputs]


def _truth(inputs: Inputs) -> Outputs:
    outputs = []
    for index, x in enumerate(inputs):
        z = reference.standard_normals(x.numel(), KEY, COUNTER + index, x.device, torch.float64)
        outputs.append(x.double() + STD * z)
    return outputs


def _looks_normal(inputs: Inputs, outputs: Outputs) -> str | None:
    """Return why ``outputs - inputs`` is not N(0, STD^2), or None: moments, and no repetition.

    Six standard errors: a right form fails once in 10^8 runs.
    """
    z = torch.cat([(o.double() - x.double()) / STD for o, x in zip(outputs, inputs, strict=True)])
    n = z.numel()
    half = n // 2
    moments = {
        "mean": (z.mean().item(), 0.0, 1.0),
        "variance": (z.square().mean().item(), 1.0, 2.0),
        "fourth moment": (z.pow(4).mean().item(), 3.0, 96.0),
        "correlation of halves": ((z[:half] * z[half : 2 * half]).mean().item(), 0.0, 2.0),
    }
    for name, (found, wanted, variance) in moments.items():
        if not abs(found - wanted) <= 6 * math.sqrt(variance / n):
            return f"{name} {found:.4g}, a standard normal has {wanted:g}"
    return None


def _randn_add(xs: list[Tensor]) -> Outputs:
    for x in xs:
        x.add_(torch.randn_like(x), alpha=STD)
    return xs


def _normal_add(xs: list[Tensor], flat: Tensor, views: list[Tensor]) -> Outputs:
    """Draw all of it at once into a buffer that is kept: no allocation, one call."""
    flat.normal_()
    torch._foreach_add_(xs, views, alpha=STD)
    return xs


def _scaled_normal_add(xs: list[Tensor], flat: Tensor, views: list[Tensor]) -> Outputs:
    flat.normal_(std=STD)
    torch._foreach_add_(xs, views)
    return xs


def _normal_in_threads(
    xs: list[Tensor],
    flat: Tensor,
    views: list[Tensor],
    parts: list[tuple[Tensor, torch.Generator]],
    pool: ThreadPoolExecutor,
) -> Outputs:
    """One generator and one slice for each core: PyTorch's own generator runs on one core."""
    list(pool.map(lambda part: part[0].normal_(generator=part[1]), parts))
    torch._foreach_add_(xs, views, alpha=STD)
    return xs


def _plain_forms(n: int, device: torch.device) -> tuple[Form, ...]:
    def kept(inputs: Inputs) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        flat = torch.zeros(n, device=inputs[0].device)
        return _copies(inputs), flat, list(flat.split([x.numel() for x in inputs]))

    def threaded(inputs: Inputs) -> tuple[object, ...]:
        xs, flat, views = kept(inputs)
        threads = torch.get_num_threads()
        generators = [torch.Generator().manual_seed(seed) for seed in range(threads)]
        parts = list(zip(flat.chunk(threads), generators, strict=False))
        return xs, flat, views, parts, ThreadPoolExecutor(threads)

    forms = (
        Form(AGAINST, _randn_add, lambda inputs: (_copies(inputs),)),
        Form("normal_ into a kept buffer, add_", _normal_add, kept),
        Form("normal_(std) into a kept buffer, add_", _scaled_normal_add, kept),
    )
    if device.type != "cpu":
        return forms
    threads = Form("normal_ in threads, add_", _normal_in_threads, threaded, compilable=False)
    return (*forms, threads)
