"""Second moments against plain PyTorch.

R rows of n elements: R n (n + 1) flops, of the upper triangle only (a plain product does twice as
many); the input is read, 4 n^2 bytes are written. A convolution's rows are patches, of which only
the image is read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, unfold

from benchmarks.registry import Case, Form, Inputs, Outputs, Target, poisoned
from dpkernels.ops.kron import conv_second_moment, second_moment


def _moment_case(
    op: str,
    name: str,
    shape: tuple[int, ...],
    rows: int,
    size: int,
    ours: Callable[[Tensor], Tensor],
    plain: tuple[Form, ...],
    truth: Callable[[Tensor], Tensor],
    target: Target,
) -> Case:
    """A second moment of ``rows`` rows of ``size`` elements, from an input of ``shape``."""
    return Case(
        op=op,
        name=name,
        dtype=torch.float32,
        parameters={"input": list(shape), "rows": rows, "size": size},
        make_inputs=lambda device, generator: [
            torch.randn(shape, generator=generator, device=device)
        ],
        bytes_moved=4 * (torch.Size(shape).numel() + size * size),
        flops=rows * size * (size + 1),
        bound="gemm",
        ours=Form("dpkernels", lambda x: [ours(x)], tuple),
        plain=plain,
        truth=lambda inputs: [truth(inputs[0].double())],
        target=target,
    )


def _mean_product(rows: Tensor) -> Tensor:
    return (rows.T @ rows).div_(len(rows))


def linear(rows: int, size: int) -> Case:
    """Return the case: activations of a linear layer with bias."""
    # Strips of the upper triangle: a quarter of the columns each, so five eighths of the work.
    width = -(-size // 4)

    def strips(x: Tensor, out: Tensor) -> Outputs:
        for start in range(0, size, width):
            stop = min(size, start + width)
            torch.mm(x[:, :stop].T, x[:, start:stop], out=out[:stop, start:stop])
            out[start:stop, :start] = out[:start, start:stop].T
        out[:-1, :-1].div_(rows)
        return [_add_mean(x, out)]

    def product(x: Tensor, out: Tensor) -> Outputs:
        torch.mm(x.T, x, out=out[:-1, :-1]).div_(rows)
        return [_add_mean(x, out)]

    def copied(x: Tensor, wide: Tensor, out: Tensor) -> Outputs:
        wide[:, :-1] = x
        return [torch.mm(wide.T, wide, out=out).div_(rows)]

    def kept(inputs: Inputs) -> tuple[Tensor, Tensor]:
        return inputs[0], poisoned(size + 1, size + 1, like=inputs[0])

    def with_copy(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        x, out = kept(inputs)
        return x, torch.ones(rows, size + 1, device=x.device), out

    def augmented(x: Tensor) -> Tensor:
        return _mean_product(torch.cat((x, x.new_ones(rows, 1)), 1))

    plain = (
        Form("cat, mm", lambda x: [augmented(x)], tuple),
        Form("augmented copy, mm, kept", copied, with_copy),
        Form("mm, mean, kept", product, kept),
        Form("mm of upper strips, mean, kept", strips, kept),
    )
    name = f"second moment, linear {rows} x {size + 1}"
    return _moment_case(
        "second_moment",
        name,
        (rows, size),
        rows,
        size + 1,
        lambda x: second_moment(x, bias=True),
        plain,
        augmented,
        Target(),
    )


def _add_mean(x: Tensor, out: Tensor) -> Tensor:
    """Write the last row and column of an augmented second moment."""
    torch.mean(x, 0, out=out[-1, :-1])
    out[:-1, -1] = out[-1, :-1]
    out[-1, -1] = 1.0
    return out


def errors(samples: int, channels: int, positions: int) -> Case:
    """Return the case: errors of a convolution, channels first."""

    def by_sample(x: Tensor) -> Tensor:
        return torch.bmm(x, x.mT).sum(0).div_(samples * positions)

    def by_sample_kept(x: Tensor, products: Tensor, out: Tensor) -> Outputs:
        torch.sum(torch.bmm(x, x.mT, out=products), 0, out=out)
        return [out.div_(samples * positions)]

    def kept(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        shape = (channels, channels)
        x = inputs[0]
        return x, poisoned(samples, *shape, like=x), poisoned(*shape, like=x)

    def rows_of(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(-1, channels)

    plain = (
        Form("bmm, sum", lambda x: [by_sample(x)], tuple),
        Form("bmm, sum, kept", by_sample_kept, kept),
        Form("transpose, mm", lambda x: [_mean_product(rows_of(x))], tuple),
    )
    return _moment_case(
        "second_moment",
        f"second moment, errors {samples} x {channels} x {positions}",
        (samples, channels, positions),
        samples * positions,
        channels,
        lambda x: second_moment(x, channel_dim=1),
        plain,
        by_sample,
        Target(),
    )


UNFOLD = "unfold, mm"


def convolution(samples: int, channels: int) -> Case:
    """Return the case: patches of a 3 x 3 convolution over 14 x 14 images, padding 1."""
    side, size = 14, channels * 9
    # A few samples' patches are less than the products' fixed workspace.
    memory_fraction = 0.25 if samples >= 256 else None

    def patches(x: Tensor) -> Tensor:
        return unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, size)

    def views(x: Tensor) -> Tensor:
        windows = pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        return windows.permute(0, 2, 3, 1, 4, 5).reshape(-1, size)

    def by_sample(x: Tensor) -> Outputs:
        columns = unfold(x, 3, padding=1)
        return [torch.bmm(columns, columns.mT).sum(0).div_(samples * side * side)]

    plain = (
        Form(UNFOLD, lambda x: [_mean_product(patches(x))], tuple),
        Form("unfold, bmm, sum", by_sample, tuple),
        Form("strided views, mm", lambda x: [_mean_product(views(x))], tuple),
    )
    return _moment_case(
        "conv_second_moment",
        f"second moment, conv {channels} x 3 x 3, {samples} of 14 x 14",
        (samples, channels, side, side),
        samples * side * side,
        size,
        lambda x: conv_second_moment(x, (3, 3), padding=1),
        plain,
        lambda x: _mean_product(patches(x)),
        Target(1.5, UNFOLD, memory_fraction=memory_fraction),
    )
