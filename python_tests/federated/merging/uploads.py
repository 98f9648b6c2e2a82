"""Networks and Fishers that tests compress: the paper's shapes, factors with decaying spectra."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from dpkernels.federated.merging.layout import LayerLayout, Layout
from dpkernels.fisher.information import Diagonal, Fisher, Kronecker

LENET = {
    "conv1.weight": (6, 1, 5, 5),
    "conv2.weight": (16, 6, 5, 5),
    "fc1.weight": (120, 256),
    "fc2.weight": (84, 120),
    "fc3.weight": (10, 84),
}
CNN = {
    "conv1.weight": (32, 3, 5, 5),
    "conv2.weight": (64, 32, 5, 5),
    "fc1.weight": (512, 1600),
    "fc2.weight": (128, 512),
    "fc3.weight": (10, 128),
}


def layout_of(shapes: Mapping[str, tuple[int, ...]], kind: str = "kronecker") -> Layout:
    """Return the layout of a network without biases, F of one kind everywhere."""
    layers = tuple(
        LayerLayout(name.removesuffix(".weight"), "kronecker", name)
        if kind == "kronecker"
        else LayerLayout(name, "diagonal", name)
        for name in shapes
    )
    return Layout(shapes, layers)


def factor(size: int, generator: Generator, decay: float = 0.9) -> Tensor:
    """Return a float32 matrix >= 0 whose eigenvalues fall by ``decay`` each, at most 100 times."""
    q, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    values = decay ** torch.arange(size, dtype=torch.float64).clamp(max=100)
    product = ((q * values) @ q.T).float()
    return (product + product.T) / 2


def made(
    shapes: Mapping[str, tuple[int, ...]], kind: str = "kronecker", seed: int = 0
) -> tuple[dict[str, Tensor], Fisher]:
    """Return a state of these shapes and a Fisher of one kind for all of it, drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    layout = layout_of(shapes, kind)
    layers: dict[str, Kronecker | Diagonal] = {}
    for layer in layout.layers:
        assert layer.weight is not None
        if kind == "kronecker":
            a, g = (factor(size, generator) for size in layout.factors(layer))
            layers[layer.name] = Kronecker(layer.weight, None, a, g)
        else:
            # As on LeNet: median 2^-13, some below 2^-40, some zero.
            logs = -13 + 8 * torch.randn(shapes[layer.weight], generator=generator)
            values = torch.exp2(logs) * (torch.rand(logs.shape, generator=generator) > 0.1)
            layers[layer.name] = Diagonal(layer.weight, values)
    return state, Fisher(layers, {}, 6000)


def mixed() -> tuple[dict[str, Tensor], Fisher]:
    """Return a small network with biases, a diagonal, a scalar, and a parameter without F."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "conv.weight": (4, 2, 3, 3),
        "conv.bias": (4,),
        "norm.weight": (4,),
        "scale": (),
        "fc.weight": (5, 36),
        "fc.bias": (5,),
        "only.bias": (3,),
    }
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    layers: dict[str, Kronecker | Diagonal] = {
        "conv": Kronecker("conv.weight", "conv.bias", factor(19, generator), factor(4, generator)),
        "norm.weight": Diagonal("norm.weight", torch.rand(4, generator=generator)),
        "fc": Kronecker("fc.weight", None, factor(36, generator), factor(5, generator)),
        "only": Kronecker(None, "only.bias", factor(1, generator), factor(3, generator)),
    }
    return state, Fisher(layers, {"scale": "no rule", "fc.bias": "frozen"}, 17)


def tensors_of(fisher: Fisher) -> list[Tensor]:
    """Return all factors and diagonals."""
    found: list[Tensor] = []
    for layer in fisher.layers.values():
        found += [layer.a, layer.g] if isinstance(layer, Kronecker) else [layer.values]
    return found


def assert_valid(fisher: Fisher, semidefinite: bool = True) -> None:
    """Assert that values are finite, and F >= 0 but for the rounding of float32."""
    for tensor in tensors_of(fisher):
        assert tensor.dtype == torch.float32 and bool(tensor.isfinite().all())
    for layer in fisher.layers.values():
        if isinstance(layer, Diagonal):
            assert bool((layer.values >= 0).all())
        elif semidefinite:
            for matrix in (layer.a, layer.g):
                assert torch.equal(matrix, matrix.T)
                # Each entry is rounded by eps / 2 of itself, and |entries| <= trace: the matrix
                # moves by at most size eps / 2 trace.
                exact = matrix.double()
                slack = len(matrix) * torch.finfo(torch.float32).eps * float(exact.trace())
                assert float(torch.linalg.eigvalsh(exact).min()) >= -slack
