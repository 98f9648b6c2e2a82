"""Checks that the engine's gradients of samples are those of autograd on each sample alone.

For one's own modules, on inputs that are nobody's data: what is returned has no noise. The engine
never writes down gradients of samples, so each is found by a backward pass of its own, through the
whole batch, in which the other samples have no part in the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dpkernels.opacus.grad_sample.utils import get_gsm_class
from dpkernels.opacus.optimizers import DPOptimizer
from dpkernels.opacus.utils.module_utils import clone_module, trainable_parameters

__all__ = [
    "check_per_sample_gradients_are_correct",
    "clone_module",
    "compute_grad_samples_microbatch_and_opacus",
    "compute_microbatch_grad_sample",
    "compute_opacus_grad_sample",
    "get_grad_sample_modes",
    "is_batch_empty",
]

Inputs = Tensor | PackedSequence | tuple[Tensor, ...]
Gradients = dict[str, Tensor]
# No gradient is longer, and its square is a number in float64.
_NEVER = 1e100


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:
    """Return names of modes, which all give the same numbers."""
    return ["hooks", "functorch", "ew"] if use_ew else ["hooks", "functorch"]


def is_batch_empty(batch: Tensor | Sequence[Tensor]) -> bool:
    """Return whether a batch, or the first tensor of several, has no elements."""
    return (batch if isinstance(batch, Tensor) else batch[0]).numel() == 0


def compute_opacus_grad_sample(
    x: Inputs,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
) -> Gradients:
    """Return the engine's gradients of all samples, ``[B, *shape]``, by the parameter's name.

    The loss of a sample is the average, or the sum, of the absolute values of its outputs.
    """
    model = clone_module(module)
    wrapped = get_gsm_class(grad_sample_mode)(
        model, batch_first=batch_first, loss_reduction="sum", strict=False
    )
    trained = dict(trainable_parameters(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no noise
        optimizer = DPOptimizer(
            torch.optim.SGD(trained.values(), 0.0),
            noise_multiplier=0.0,
            max_grad_norm=_NEVER,
            expected_batch_size=1,
            loss_reduction="sum",
        )
        found: dict[str, list[Tensor]] = {name: [] for name in trained}
        for loss in _losses(wrapped, x, batch_first, loss_reduction):
            loss.backward()
            optimizer.step()
            for name, parameter in trained.items():
                assert parameter.grad is not None
                found[name].append(parameter.grad.clone())
    return {name: torch.stack(each) for name, each in found.items() if each}


def compute_microbatch_grad_sample(
    x: Tensor | Sequence[Tensor],
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> Gradients:
    """Return the same by autograd, on batches of one sample.

    x: a batch, or a list of samples. chunk_method: yields samples of a batch whose first axis is
        theirs, or tuples of arguments.
    """
    model = clone_module(module)
    trained = dict(trainable_parameters(model))
    found: dict[str, list[Tensor]] = {name: [] for name in trained}
    samples = x.transpose(0, 1) if isinstance(x, Tensor) and not batch_first else x
    for sample in chunk_method(samples):
        if not isinstance(sample, tuple):
            sample = (sample.unsqueeze(0 if batch_first else 1),)
        torch.manual_seed(0)
        loss = _reduced(_first(model(*sample)), loss_reduction)
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            found[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(each) for name, each in found.items()}


def compute_grad_samples_microbatch_and_opacus(
    x: Inputs,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> tuple[Gradients, Gradients]:
    """Return autograd's gradients and the engine's; raise RuntimeError for an empty batch."""
    if not isinstance(x, PackedSequence) and is_batch_empty(x):
        raise RuntimeError("x must have samples, got an empty batch")
    samples: Any = _unpacked(x) if isinstance(x, PackedSequence) else x
    return (
        compute_microbatch_grad_sample(samples, module, batch_first, loss_reduction, chunk_method),
        compute_opacus_grad_sample(x, module, batch_first, loss_reduction, grad_sample_mode),
    )


def check_per_sample_gradients_are_correct(
    x: Inputs,
    module: nn.Module,
    *,
    batch_first: bool = True,
    atol: float = 10e-6,
    rtol: float = 10e-5,
    grad_sample_mode: str = "hooks",
) -> bool:
    """Return whether the engine's gradients of samples are autograd's, but for rounding."""
    for loss_reduction in ("sum", "mean"):
        wanted, found = compute_grad_samples_microbatch_and_opacus(
            x, module, batch_first, loss_reduction, grad_sample_mode
        )
        for name, gradient in wanted.items():
            if not torch.allclose(found[name], gradient, atol=atol, rtol=rtol):
                return False
    return True


def _losses(
    model: nn.Module, x: Inputs, batch_first: bool, loss_reduction: str
) -> Iterator[Tensor]:
    """Yield the loss of each sample, from a call of the model on all of them."""
    index = batch = 0
    while index == 0 or index < batch:
        torch.manual_seed(0)
        output = _first(model(*(x if type(x) is tuple else (x,))))
        samples = _samples(output, batch_first)
        batch = len(samples)
        if batch == 0:
            return
        yield _reduced(samples[index], loss_reduction)
        index += 1


def _samples(output: Tensor | PackedSequence, batch_first: bool) -> Sequence[Tensor]:
    if isinstance(output, PackedSequence):
        return _unpacked(output)
    return output.unbind(0 if batch_first else 1)


def _unpacked(packed: PackedSequence) -> list[Tensor]:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    return [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]


def _reduced(output: Tensor | PackedSequence, loss_reduction: str) -> Tensor:
    values = (output.data if isinstance(output, PackedSequence) else output).abs()
    return values.mean() if loss_reduction == "mean" else values.sum()


def _first(output: Any) -> Any:
    """Return outputs without states, of a recurrent layer, or weights, of attention."""
    is_several = isinstance(output, tuple) and not isinstance(output, PackedSequence)
    return output[0] if is_several else output
