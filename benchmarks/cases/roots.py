"""``roots``: eigendecompositions of many matrices, and inverse roots of a model's factors.

===============  ==========================================  =================================
operation        flops                                       bytes
===============  ==========================================  =================================
``eigh``         9 n^3: tridiagonal form 4/3, its vectors    n^2 read, n^2 + n written
                 4/3, QR sweeps 6
``inverse_root`` 10/3 n^3: tridiagonal form 4/3, back from   n^2 read, n^2 written
                 both sides 2
``..._newton``   2 n^3 for each product, 3 products a step,  n^2 read, n^2 written
                 15 steps
===============  ==========================================  =================================

Eigenvectors are determined up to a sign, so the eigenvalues are what is judged here; the tests hold
the vectors to LAPACK's residual and orthogonality.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, Target
from dpkernels.ops.roots import RootMethod, eigh, inverse_root

DAMPING = 1e-3
NEWTON_STEPS = 15

# Sides of the Kronecker factors, inputs with a bias. A CNN for MNIST: convolutions 1-16-32, 3 x 3,
# fully connected 1568-128-10. A transformer's four layers: query, key, value and output projections
# of width 256, and a feed-forward pair of width 1024.
CNN = (10, 16, 145, 32, 1569, 128, 129, 10)
LAYER = (*(257, 256) * 4, 257, 1024, 1025, 256)
TRANSFORMER = LAYER * 4

LOOP = "a loop of eigh"


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield batches from small to large, then the whole factor lists."""
    if quick:
        yield _eigh_case(64, 16, Target(3.0))
        yield _roots_case("inverse_root, a small list", (10, 16, 145, 32, 128), Target(1.5, LOOP))
        yield _roots_case("inverse_root_newton 2 of 64", (64, 64), Target(), "newton_schulz")
        return
    yield _eigh_case(256, 16, Target(3.0))
    yield _eigh_case(256, 32, Target(2.0))
    yield _eigh_case(128, 64, Target(1.7))
    yield _eigh_case(4, 512, Target(0.95))
    yield _eigh_case(2, 785, Target(0.95))
    yield _roots_case("inverse_root, factors of a CNN", CNN, Target(1.5, LOOP))
    yield _roots_case("inverse_root, factors of a transformer", TRANSFORMER, Target(1.5, LOOP))
    yield _roots_case("inverse_root_newton 4 of 256", (256,) * 4, Target(), "newton_schulz")


def second_moments(
    sizes: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> list[Tensor]:
    """Return E[a a^T] of rectified features with a pink spectrum, the last one a constant 1."""
    matrices = []
    for n in sizes:
        scale = torch.arange(1, n + 1, device=device).rsqrt()
        mixing = torch.randn(n, n, generator=generator, device=device) * scale[:, None]
        samples = max(512, 2 * n)
        features = torch.randn(samples, n, generator=generator, device=device) @ mixing
        features.relu_()
        features[:, -1] = 1
        matrices.append(features.T @ features / samples)
    return matrices


def _eigh_case(batch: int, n: int, target: Target) -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return [torch.stack(second_moments((n,) * batch, device, generator))]

    def ours(matrices: Tensor) -> Outputs:
        values = eigh(matrices).values
        assert isinstance(values, Tensor)
        return [values]

    def batched(matrices: Tensor) -> Outputs:
        return [torch.linalg.eigh(matrices).eigenvalues]

    def in_loop(matrices: Tensor) -> Outputs:
        return [torch.stack([torch.linalg.eigh(matrix).eigenvalues for matrix in matrices])]

    def arguments(inputs: Inputs) -> tuple[Tensor, ...]:
        return (inputs[0],)

    return Case(
        op="eigh",
        name=f"eigh {batch} of {n} x {n}",
        dtype=torch.float32,
        parameters={"batch": batch, "n": n},
        make_inputs=make_inputs,
        bytes_moved=4 * batch * (2 * n * n + n),
        flops=9 * batch * n**3,
        bound="gemm",
        ours=Form("dpkernels", ours, arguments),
        plain=(
            Form("torch.linalg.eigh, batched", batched, arguments, compilable=False),
            Form(LOOP, in_loop, arguments, compilable=False),
        ),
        truth=lambda inputs: [torch.linalg.eigvalsh(inputs[0].double())],
        target=target,
    )


def _roots_case(
    name: str, sizes: tuple[int, ...], target: Target, method: RootMethod = "auto"
) -> Case:
    newton = method == "newton_schulz"
    work = sum(n**3 for n in sizes)

    def ours(*matrices: Tensor) -> Outputs:
        return list(inverse_root(matrices, damping=DAMPING, method=method))

    return Case(
        op="inverse_root_newton" if newton else "inverse_root",
        name=name,
        dtype=torch.float32,
        parameters={"sizes": list(sizes), "damping": DAMPING, "power": -0.5, "method": method},
        make_inputs=lambda device, generator: second_moments(sizes, device, generator),
        bytes_moved=8 * sum(n * n for n in sizes),
        flops=2 * 3 * NEWTON_STEPS * work if newton else 10 * work // 3,
        bound="gemm",
        ours=Form("dpkernels", ours, tuple),
        plain=(
            Form(LOOP, lambda *matrices: [_root(m) for m in matrices], tuple, compilable=False),
            Form("eigh batched by size", _by_size, tuple, compilable=False),
            Form("a loop of eigh in Python's threads", _in_threads, tuple, compilable=False),
        ),
        truth=lambda inputs: [_root(matrix.double()) for matrix in inputs],
        target=target,
    )


def _root(matrices: Tensor) -> Tensor:
    """``V (L + damping)^(-1/2) V^T`` of ``[(b,) n, n]``."""
    values, vectors = torch.linalg.eigh(matrices)
    factors = values.clamp_(min=0).add_(DAMPING).rsqrt_()
    root: Tensor = (vectors * factors.unsqueeze(-2)) @ vectors.mT
    return root


def _by_size(*matrices: Tensor) -> Outputs:
    places: dict[int, list[int]] = {}
    for index, matrix in enumerate(matrices):
        places.setdefault(len(matrix), []).append(index)
    roots: dict[int, Tensor] = {}
    for indices in places.values():
        together = _root(torch.stack([matrices[index] for index in indices]))
        roots.update(zip(indices, together, strict=True))
    return [roots[index] for index in range(len(matrices))]


def _in_threads(*matrices: Tensor) -> Outputs:
    """Largest first, so that no thread is left with a large one at the end."""
    order = sorted(range(len(matrices)), key=lambda index: -len(matrices[index]))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        found = dict(zip(order, pool.map(lambda i: _root(matrices[i]), order), strict=True))
    return [found[index] for index in range(len(matrices))]
