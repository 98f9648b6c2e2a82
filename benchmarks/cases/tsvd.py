"""``tsvd``: singular values of Fourier slices, thresholded and alone, against PyTorch's SVD.

Small layers are those of LeNet as LeCun had it, with three input channels. FedCEO's "LeNet-5" is
another, wider model: its server step folds the uploads ``[K, D]``, thresholds and unfolds, and is
what ``server step`` times. An SVD of its 1600 x 512 layer takes 25 s, so Gram forms compete alone.

A layer of K clients, m = max(d, h), n = min(d, h), has K / 2 + 1 slices. Those of frequency 0 and
K / 2 are real and count as a quarter; with s complex slices the flops are

===================  ======================  =====================================================
``soft_threshold``   s (12 m n^2 + 17 n^3)   Gram 4 m n^2, product 8 m n^2; reduction 16/3, QL 6,
                                             reflections 4 and operator 2 n^3 for n / 2 vectors
``singular_values``  s (4 m n^2 + 5 n^3)     Gram, reduction
===================  ======================  =====================================================

Bytes: the tensors read and written once (read, for the singular values). The threshold is the
median singular value of each layer, so that half of them are kept, and the clients' weights are
noise: nothing decays quickly, which would make any eigensolver's work easier.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.registry import Case, Form, Inputs, Outputs, Target
from dpkernels.federated.folding import fold, unfold
from dpkernels.federated.problem import Layer
from dpkernels.ops import tsvd

CLIENTS = 10
# The hidden layer of a 784-64-10 perceptron.
HIDDEN = ((784, 64),)
# LeCun's LeNet for 3 x 32 x 32 images: two convolutions as [out, in * 5 * 5], three linear layers.
SMALL_LENET = ((6, 75), (16, 150), (400, 120), (120, 84), (84, 10))
# FedCEO's LeNet-5 for CIFAR-10, weights and biases, and its perceptron for EMNIST letters.
LENET_5 = (
    *((32, 3, 5, 5), (32,), (64, 32, 5, 5), (64,), (512, 1600), (512,), (512, 512), (512,)),
    *((10, 512), (10,)),
)
PERCEPTRON = ((64, 784), (26, 64))

SVD = "rfft, svd, irfft"

Threshold = Callable[[Tensor, float], Tensor]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Yield single layers, a small LeNet's in one call, and whole server steps."""
    if quick:
        yield _threshold_case("tsvd 60 x 16 x 10", ((60, 16),), Target())
        yield _threshold_case("tsvd 2 layers, 10 clients", ((6, 75), (84, 10)), Target())
        yield _values_case("singular values 60 x 16 x 10", ((60, 16),))
        yield _shrink_case("shrink 60 x 16 x 10", ((60, 16),))
        yield _server_case("server step 2 layers", ((16, 4, 3, 3), (16,)))
        return
    yield _threshold_case("tsvd 784 x 64 x 10", HIDDEN, Target(4.0, SVD))
    yield _threshold_case("tsvd small LeNet, 10 clients", SMALL_LENET, Target(4.0, SVD))
    yield _threshold_case("tsvd small LeNet, clients first", SMALL_LENET, Target(), True)
    yield _values_case("singular values 784 x 64 x 10", HIDDEN)
    yield _values_case("singular values small LeNet, 10 clients", SMALL_LENET)
    yield _shrink_case("shrink 784 x 64 x 10, optimal", HIDDEN)
    yield _server_case("server step MLP, 10 clients", PERCEPTRON)
    yield _server_case("server step LeNet-5, 10 clients", LENET_5)


def _flops(shapes: tuple[tuple[int, int], ...], products: int, cubes: int) -> int:
    complex_slices = CLIENTS / 2 - 1 + 2 / 4
    total = 0.0
    for shape in shapes:
        m, n = max(shape), min(shape)
        total += complex_slices * (products * m * n**2 + cubes * n**3)
    return int(total)


def _threshold_case(
    name: str,
    shapes: tuple[tuple[int, int], ...],
    target: Target,
    clients_first: bool = False,
) -> Case:
    elements = CLIENTS * sum(d * h for d, h in shapes)

    def ours(tensors: list[Tensor], thresholds: list[float]) -> Outputs:
        return list(tsvd.soft_threshold(tensors, thresholds).tensors)

    return Case(
        op="tsvd_soft_threshold",
        name=name,
        dtype=torch.float32,
        parameters={"shapes": [list(shape) for shape in shapes], "clients": CLIENTS},
        make_inputs=functools.partial(_inputs, shapes, clients_first),
        bytes_moved=2 * 4 * elements,
        flops=_flops(shapes, 12, 17),
        bound="gemm",
        ours=Form("dpkernels", ours, lambda inputs: (inputs, _medians(inputs))),
        plain=tuple(_each(name, form) for name, form in _THRESHOLD_FORMS.items()),
        truth=_truth,
        target=target,
    )


def _values_case(name: str, shapes: tuple[tuple[int, int], ...]) -> Case:
    def ours(tensors: list[Tensor]) -> Outputs:
        return list(tsvd.singular_values(tensors))

    def plain(form: Callable[[Tensor], Tensor]) -> Callable[..., Outputs]:
        return lambda tensors: [form(x) for x in tensors]

    return Case(
        op="tsvd_singular_values",
        name=name,
        dtype=torch.float32,
        parameters={"shapes": [list(shape) for shape in shapes], "clients": CLIENTS},
        make_inputs=functools.partial(_inputs, shapes, False),
        bytes_moved=4 * CLIENTS * sum(d * h for d, h in shapes),
        flops=_flops(shapes, 4, 5),
        bound="gemm",
        ours=Form("dpkernels", ours, lambda inputs: (inputs,)),
        plain=(
            Form("rfft, svdvals", plain(_svdvals), lambda inputs: (inputs,)),
            Form("rfft, tall, svdvals", plain(_tall_svdvals), lambda inputs: (inputs,)),
            Form("rfft, Gram, eigvalsh", plain(_gram_values), lambda inputs: (inputs,)),
        ),
        truth=lambda inputs: [_svdvals(x.double()) for x in inputs],
    )


def _shrink_case(name: str, shapes: tuple[tuple[int, int], ...]) -> Case:
    """Time Gavish and Donoho's shrinker, its edge at half of what the noise has."""
    by = tsvd.Optimal(0.5 * tsvd.slice_noise(1.0, CLIENTS))

    def ours(tensors: list[Tensor]) -> Outputs:
        return list(tsvd.shrink(tensors, by).tensors)

    def plain(tensors: list[Tensor]) -> Outputs:
        return [_shrunk_by_svd(x, by) for x in tensors]

    return Case(
        op="tsvd_shrink",
        name=name,
        dtype=torch.float32,
        parameters={"shapes": [list(shape) for shape in shapes], "clients": CLIENTS},
        make_inputs=functools.partial(_inputs, shapes, False),
        bytes_moved=2 * 4 * CLIENTS * sum(d * h for d, h in shapes),
        flops=_flops(shapes, 12, 17),
        bound="gemm",
        ours=Form("dpkernels", ours, lambda inputs: (inputs,)),
        plain=(Form(SVD, plain, lambda inputs: (inputs,)),),
        truth=lambda inputs: plain([x.double() for x in inputs]),
    )


def _shrunk_by_svd(x: Tensor, by: tsvd.Shrinker) -> Tensor:
    u, s, vh = torch.linalg.svd(_slices(x), full_matrices=False)
    return _clients((u * by(s, x.shape[0], x.shape[1]).unsqueeze(1)) @ vh, x)


def _server_case(name: str, shapes: tuple[tuple[int, ...], ...]) -> Case:
    sizes = [math.prod(shape) for shape in shapes]
    begins = itertools.accumulate(sizes, initial=0)
    layers = [Layer(str(i), at, s) for i, (at, s) in enumerate(zip(begins, shapes, strict=False))]
    folded = [(x.shape[0], x.shape[1]) for x in fold(layers, torch.empty(1, sum(sizes)))]

    def uploads(device: torch.device, generator: torch.Generator) -> Inputs:
        return [torch.randn(CLIENTS, sum(sizes), generator=generator, device=device)]

    def arguments(inputs: Inputs) -> tuple[Tensor, list[float]]:
        return inputs[0], [
            _gram_values(x.double()).median().item() for x in fold(layers, inputs[0])
        ]

    def ours(given: Tensor, thresholds: list[float]) -> Outputs:
        tensors = tsvd.soft_threshold(fold(layers, given), thresholds).tensors
        return [unfold(layers, list(tensors), given)]

    def plain(form: Threshold) -> Callable[..., Outputs]:
        def run(given: Tensor, thresholds: list[float]) -> Outputs:
            pairs = zip(fold(layers, given), thresholds, strict=True)
            return [unfold(layers, [form(x, tau) for x, tau in pairs], given)]

        return run

    forms = [form for form in _THRESHOLD_FORMS if "Gram" in form]
    exact = plain(_THRESHOLD_FORMS[forms[0]])
    return Case(
        op="tsvd_soft_threshold",
        name=name,
        dtype=torch.float32,
        parameters={"shapes": [list(shape) for shape in shapes], "clients": CLIENTS},
        make_inputs=uploads,
        bytes_moved=2 * 4 * CLIENTS * sum(sizes),
        flops=_flops(tuple(folded), 12, 17),
        bound="gemm",
        ours=Form("dpkernels", ours, arguments),
        plain=tuple(Form(form, plain(_THRESHOLD_FORMS[form]), arguments) for form in forms),
        truth=lambda inputs: exact(inputs[0].double(), arguments(inputs)[1]),
    )


def _inputs(
    shapes: tuple[tuple[int, int], ...],
    clients_first: bool,
    device: torch.device,
    generator: torch.Generator,
) -> Inputs:
    """Return normal weights ``[d, h, K]``, with the clients last in memory or first."""
    made = []
    for d, h in shapes:
        shape = (CLIENTS, d, h) if clients_first else (d, h, CLIENTS)
        x = torch.randn(shape, generator=generator, device=device)
        made.append(x.permute(1, 2, 0) if clients_first else x)
    return made


def _slices(x: Tensor) -> Tensor:
    slices: Tensor = torch.fft.rfft(x, dim=2).permute(2, 0, 1)
    return slices


def _clients(slices: Tensor, like: Tensor) -> Tensor:
    clients: Tensor = torch.fft.irfft(slices.permute(1, 2, 0), n=like.shape[2], dim=2)
    return clients


def _medians(inputs: Inputs) -> list[float]:
    return [torch.linalg.svdvals(_slices(x.double())).median().item() for x in inputs]


def _truth(inputs: Inputs) -> Outputs:
    thresholds = _medians(inputs)
    return [_svd(x.double(), tau) for x, tau in zip(inputs, thresholds, strict=True)]


def _each(name: str, form: Threshold) -> Form:
    def run(tensors: list[Tensor], thresholds: list[float]) -> Outputs:
        return [form(x, tau) for x, tau in zip(tensors, thresholds, strict=True)]

    return Form(name, run, lambda inputs: (inputs, _medians(inputs)))


def _svd(x: Tensor, tau: float) -> Tensor:
    u, s, vh = torch.linalg.svd(_slices(x), full_matrices=False)
    shrunk = (u * (s - tau).clamp_(min=0).unsqueeze(1)) @ vh
    return _clients(shrunk, x)


def _transposed(form: Threshold, tall: bool, x: Tensor, tau: float) -> Tensor:
    """Threshold the transpose of a matrix that is wide (to make it tall), or tall."""
    if (x.shape[0] < x.shape[1]) == tall:
        return form(x.transpose(0, 1), tau).transpose(0, 1)
    return form(x, tau)


def _kept_svd(x: Tensor, tau: float) -> Tensor:
    """Multiply only with the singular vectors that are kept, slice by slice."""
    u, s, vh = torch.linalg.svd(_slices(x), full_matrices=False)
    shrunk = torch.empty(u.shape[0], u.shape[1], vh.shape[2], dtype=u.dtype, device=u.device)
    for i, kept in enumerate((s > tau).sum(1).tolist()):
        torch.mm(u[i, :, :kept] * (s[i, :kept] - tau), vh[i, :kept], out=shrunk[i])
    return _clients(shrunk, x)


def _gram(x: Tensor, tau: float) -> Tensor:
    """Take P from the eigenpairs of ``M^H M`` in complex128; for matrices that are tall."""
    slices = _slices(x)
    wide = slices.to(torch.complex128)
    values, vectors = torch.linalg.eigh(wide.mH @ wide)
    s = values.clamp_(min=0).sqrt_()
    factors = torch.where(s > tau, 1 - tau / s, 0.0)
    operators = (vectors * factors.unsqueeze(1)) @ vectors.mH
    shrunk = slices @ operators.to(slices.dtype)
    return _clients(shrunk, x)


def _gram_contiguous(x: Tensor, tau: float) -> Tensor:
    """Do the same with the slices copied, once, to where products find them in order."""
    slices = _slices(x).contiguous()
    wide = slices.to(torch.complex128)
    values, vectors = torch.linalg.eigh(torch.bmm(wide.mH, wide))
    s = values.clamp_(min=0).sqrt_()
    factors = torch.where(s > tau, 1 - tau / s, 0.0)
    operators = torch.bmm(vectors * factors.unsqueeze(1), vectors.mH)
    shrunk = torch.bmm(slices, operators.to(slices.dtype))
    return _clients(shrunk, x)


_THRESHOLD_FORMS: dict[str, Threshold] = {
    SVD: _svd,
    "rfft, svd of the tall side, irfft": functools.partial(_transposed, _svd, True),
    "rfft, svd of the wide side, irfft": functools.partial(_transposed, _svd, False),
    "rfft, svd, kept vectors, irfft": functools.partial(_transposed, _kept_svd, True),
    "rfft, Gram, eigh, irfft": functools.partial(_transposed, _gram, True),
    "rfft, copy, Gram, eigh, irfft": functools.partial(_transposed, _gram_contiguous, True),
}


def _svdvals(x: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(_slices(x))
    return values


def _tall_svdvals(x: Tensor) -> Tensor:
    return _svdvals(x if x.shape[0] >= x.shape[1] else x.transpose(0, 1))


def _gram_values(x: Tensor) -> Tensor:
    slices = _slices(x if x.shape[0] >= x.shape[1] else x.transpose(0, 1)).contiguous()
    wide = slices.to(torch.complex128)
    values: Tensor = torch.linalg.eigvalsh(torch.bmm(wide.mH, wide))
    return values.clamp_(min=0).sqrt_().flip(1).to(x.dtype)
