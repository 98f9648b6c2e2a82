"""Passes that count twice, in the wrong place, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.adversary.attack import Attack, Claim, attack
from benchmarks.adversary.moved import Records, gradient, losses, moved, one_pass, private
from dpkernels.engine.clipping import Adaptive, Flat


def network() -> nn.Module:
    """Return a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def records() -> Records:
    """Return records whose gradients are all clipped."""
    torch.manual_seed(1)
    return Records.of(100 * torch.randn(4, 6))


def _saliency(by: str) -> float:
    """Return the move if input gradients are taken before the training pass."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, records: Records) -> None:
        x = records.inputs[0].clone().requires_grad_()
        loss = model(x).sum()
        if by == "grad":
            (found,) = torch.autograd.grad(loss, x)
        else:
            loss.backward(inputs=[x])
            assert x.grad is not None
            found = x.grad
        one_pass(model, optimizer, Records((x.detach() + 0.01 * found.sign(),), records.weights))

    return moved(network(), records(), train)


@attack(2, "torch.autograd.grad(loss, x), then backward()")
def autograd_grad() -> float:
    """Adversarial training."""
    return _saliency("grad")


@attack(2, "loss.backward(inputs=[x]), then backward()")
def backward_of_inputs() -> float:
    """Saliency."""
    return _saliency("backward")


def _before_the_pass(first: Callable[[nn.Module, Tensor], None]) -> float:
    """Return the move if something is asked of a loss before the training pass."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, records: Records) -> None:
        first(model, losses(model(*records.inputs)).sum())
        one_pass(model, optimizer, records)

    return moved(network(), records(), train)


@attack(2, "torch.autograd.grad(loss, parameters), then backward()")
def grad_of_parameters() -> float:
    """Gradients that the user asks for, and gets none of."""
    return _before_the_pass(
        lambda model, loss: _ignored(
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        )
    )


@attack(2, "loss.backward(inputs=[one parameter]), then backward()")
def backward_of_one_parameter() -> float:
    """A pass that would accumulate into one parameter only."""
    return _before_the_pass(
        lambda model, loss: loss.backward(inputs=[next(iter(model.parameters()))])
    )


def _ignored(found: object) -> None:
    """Take no notice."""


@attack(10, "model.zero_grad() between two backward passes")
def model_zero_grad() -> float:
    """A first pass whose gradients the user throws away by the model."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, records: Records) -> None:
        one_pass(model, optimizer, records)
        model.zero_grad()
        one_pass(model, optimizer, records)

    return moved(network(), records(), train)


@attack(10, "Adaptive.max_norm lowered between backward() and step()")
def adaptive_bound() -> float:
    """Noise, and the accountant's C, of the lower bound; sums clipped to the higher one."""
    sums = []
    batch = Records(records().inputs, torch.full((4,), 1e4))
    for part in (batch, batch.without(0, "removed")):
        model, clipping = network(), Adaptive(10.0, count_std=1e-12)
        training, optimizer = private(model, clipping)
        one_pass(model, optimizer, part)
        clipping.max_norm = 1.0
        sensitivity = training.sensitivity
        optimizer.step()
        sums.append(gradient(model))
        training.detach()
    return float((sums[0] - sums[1]).norm()) / sensitivity


@attack(10, "deep copy of model and optimizer, trained")
def deep_copy() -> float:
    """The copy's gradient, which nobody clips."""
    sums = []
    batch = Records(records().inputs, torch.full((4,), 1e4))
    for part in (batch, batch.without(0, "removed")):
        model = network()
        training, optimizer = private(model, Flat(1.0))
        model, optimizer = copy.deepcopy((model, optimizer))
        one_pass(model, optimizer, part)
        optimizer.step()
        sums.append(gradient(model))
        training.detach()
    return float((sums[0] - sums[1]).norm())


def _moved_after(change: Callable[[nn.Module], nn.Module]) -> float:
    """Return the move of what a new optimizer is given, after the private model was changed."""
    sums = []
    batch = Records(records().inputs, torch.full((4,), 1e4))
    for part in (batch, batch.without(0, "removed")):
        model = network()
        training, _ = private(model, Flat(1.0))
        changed = change(model)
        optimizer = torch.optim.SGD(changed.parameters(), lr=0.0)
        one_pass(changed, optimizer, part)
        optimizer.step()
        sums.append(gradient(changed))
        training.detach()
    return float((sums[0] - sums[1]).norm())


@attack(10, "deep copy of the model alone, with an optimizer of its own")
def copy_of_model() -> float:
    """The copy looks private, and is not."""
    return _moved_after(copy.deepcopy)


@attack(10, "head replaced after make_private, with a new optimizer")
def replaced_head() -> float:
    """A layer that nobody follows."""

    def change(model: nn.Module) -> nn.Module:
        torch.manual_seed(2)
        model[2] = nn.Linear(8, 4)  # type: ignore[operator]
        return model

    return _moved_after(change)


class Standardised(nn.Conv2d):
    """A convolution with standardised weights, by the method that torch offers for it."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        mean = weight.mean((1, 2, 3), keepdim=True)
        output: Tensor = super()._conv_forward(input, (weight - mean) * 10, bias)
        return output


@attack(10, "Conv2d subclass with its own _conv_forward", Claim("of the output", most=1e-5))
def conv_forward() -> float:
    """How far the output in private training is from the module's own."""
    torch.manual_seed(0)
    model, x = Standardised(2, 3, 3), torch.randn(4, 2, 6, 6)
    wanted = model(x).detach()
    training, _ = private(model)
    found = model(x).detach()
    training.detach()
    return float((found - wanted).norm() / wanted.norm())


ATTACKS: list[Attack] = [
    autograd_grad,
    backward_of_inputs,
    grad_of_parameters,
    backward_of_one_parameter,
    model_zero_grad,
    adaptive_bound,
    deep_copy,
    copy_of_model,
    replaced_head,
    conv_forward,
]
