"""What private gradients should be: single-sample autograd, a norm, a factor, a sum; float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels
from dpkernels.precondition import Sides

Loss = Callable[[Any], Tensor]


def square(output: Tensor) -> Tensor:
    """Return one loss for each sample, curved, so that errors depend on everything before.

    Outputs weigh differently: a plain sum of squares is the same for all that a norm makes.
    """
    squares = output.flatten(1).square()
    weights = torch.linspace(0.5, 1.5, squares.shape[1], dtype=squares.dtype, device=squares.device)
    return (squares * weights).mean(1)


def sample_gradients(
    model: nn.Module, inputs: Sequence[Tensor], loss: Loss = square
) -> list[dict[str, Tensor]]:
    """Return every sample's gradient, by the name of the parameter."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = []
    for i in range(inputs[0].shape[0]):
        value = loss(model(*(x[i : i + 1] for x in inputs))).sum()
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        gradients.append(
            {
                name: torch.zeros_like(p) if g is None else g
                for (name, p), g in zip(trained.items(), found, strict=True)
            }
        )
    return gradients


def norm(gradient: Mapping[str, Tensor]) -> float:
    """Return the norm over all parameters."""
    return float(torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt())


def clipped_sum(gradients: Sequence[Mapping[str, Tensor]], max_norm: float) -> dict[str, Tensor]:
    """Return the sum of the gradients, each clipped to ``max_norm``."""
    total = {name: torch.zeros_like(g) for name, g in gradients[0].items()}
    for gradient in gradients:
        factor = min(1.0, max_norm / norm(gradient)) if norm(gradient) > 0 else 1.0
        for name, g in gradient.items():
            total[name] += factor * g
    return total


def median_norm(gradients: Sequence[Mapping[str, Tensor]]) -> float:
    """Return a bound that clips some samples and leaves others alone."""
    return float(torch.tensor([norm(g) for g in gradients], dtype=torch.float64).median())


def private(
    model: nn.Module, max_norm: Any, *, expected_batch_size: float = 1.0, **options: Any
) -> tuple[dpkernels.PrivateTraining, torch.optim.Optimizer]:
    """Return private training of ``model`` without noise, and its optimizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    arguments: dict[str, Any] = {"noise_multiplier": 0.0, "loss_reduction": "sum"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = dpkernels.make_private(
            model,
            optimizer,
            max_grad_norm=max_norm,
            expected_batch_size=expected_batch_size,
            **arguments,
        )
    return training, optimizer


def private_sum(
    model: nn.Module,
    inputs: Sequence[Tensor],
    max_norm: Any,
    loss: Loss = square,
    reduction: str = "sum",
    **options: Any,
) -> dict[str, Tensor]:
    """Return what the engine makes of one batch, without noise, by the name of the parameter."""
    model = copy.deepcopy(model)
    _, optimizer = private(model, max_norm, loss_reduction=reduction, **options)
    losses = loss(model(*inputs))
    (losses.sum() if reduction == "sum" else losses.mean()).backward()
    optimizer.step()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return ``grad`` of every trained parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = parameter.grad.clone()
    return found


def assert_same(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert equality but for float64 rounding, relative to the largest of all gradients."""
    assert actual.keys() == wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values() if g.numel())
    assert scale > 0, "nothing to compare: every gradient is zero"
    for name, g in wanted.items():
        # torch's own tolerance for float64, at a scale of 1.
        torch.testing.assert_close(
            actual[name] / scale, g / scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def preconditioned(
    gradient: Mapping[str, Tensor], sides: Mapping[str, Sides], model: nn.Module
) -> dict[str, Tensor]:
    """Return the gradient with dense factors on both sides of every layer that has them."""
    result = dict(gradient)
    for layer, both in sides.items():
        weight = gradient[f"{layer}.weight"]
        bias = gradient.get(f"{layer}.bias")
        rows = weight.flatten(1)
        outputs, inputs = rows.shape
        left = both.left.dense() if both.left is not None else torch.eye(outputs).double()
        if both.right is not None and both.right.size == inputs + 1:
            assert bias is not None
            whole = left @ torch.cat([rows, bias.unsqueeze(1)], 1) @ both.right.dense()
            result[f"{layer}.weight"] = whole[:, :-1].reshape(weight.shape)
            result[f"{layer}.bias"] = whole[:, -1]
            continue
        right = both.right.dense() if both.right is not None else torch.eye(inputs).double()
        result[f"{layer}.weight"] = (left @ rows @ right).reshape(weight.shape)
        if bias is not None:
            result[f"{layer}.bias"] = left @ bias
    return result
