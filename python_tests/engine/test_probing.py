"""Passes on probes leave nothing behind: in the model, in torch, in what training has collected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkernels.engine import Unsupported
from dpkernels.engine.probing import probing, undisturbed
from dpkernels.engine.sides import IDENTITY
from python_tests.engine.oracle import gradients_of, private, square


class Drawing(nn.Module):
    """Dropout, a generator's draw, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(3))
        self.drop.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(self.drop(torch.tanh(self.first(x)))) + 0 * torch.rand(1)


class Counting(Drawing):
    """Buffers that every call changes, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        self.last = y.detach().mean(0)
        return y


def probe(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Run a pass on probes; return how often each layer delivered."""
    delivered: dict[str, int] = {}

    def layer_complete(current, layer, captured):
        delivered[layer.name] = delivered.get(layer.name, 0) + 1

    with undisturbed(model), probing(model, layer_complete, lambda current: None) as layers:
        assert [layer.name for layer in layers] == ["first", "second"]
        assert not any(module.training for module in model.modules())
        square(model(x)).sum().backward()
    return delivered


@pytest.mark.parametrize("trained", [False, True], ids=["before", "after make_private"])
def test_probes_leave_modes_buffers_gradients_and_generators(trained):
    model = Drawing()
    if trained:
        private(model, 1.0)
    model.first.weight.grad = torch.ones(6, 4)
    x = torch.randn(5, 4)
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    buffers = dict(model.named_buffers())
    values, state = {n: b.clone() for n, b in buffers.items()}, torch.get_rng_state()
    assert probe(model, x) == {"first": 1, "second": 1}
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(after is buffers[name] for name, after in model.named_buffers())
    assert all(torch.equal(b, values[n]) for n, b in model.named_buffers())
    assert torch.equal(model.first.weight.grad, torch.ones(6, 4))
    assert all(p.grad is None for p in model.second.parameters())


@pytest.mark.parametrize("trained", [False, True], ids=["before", "after make_private"])
def test_a_model_that_writes_to_buffers_is_refused_and_they_are_put_back(trained):
    model = Counting()
    if trained:
        private(model, 1.0)
    buffers = dict(model.named_buffers())
    values = {n: b.clone() for n, b in buffers.items()}
    with pytest.raises(
        Unsupported, match=r"calls of the model itself \(Counting\): the forward pass writes"
    ):
        probe(model, torch.randn(5, 4))
    assert all(after is buffers[name] for name, after in model.named_buffers())
    assert all(torch.equal(b, values[n]) for n, b in model.named_buffers())


def test_a_model_is_plain_again_after_probes():
    model = Drawing()
    probe(model, torch.randn(5, 4))
    assert not any("forward" in vars(module) for module in model.modules())
    model(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("place", ["between microbatches", "between forward and backward"])
@pytest.mark.parametrize("several_calls", ["refuse", "same samples"])
def test_a_step_in_progress_does_not_notice_probes(place, several_calls):
    sums, counts = [], []
    for probed in (False, True):
        torch.manual_seed(0)
        model = Drawing().double()
        training, optimizer = private(model, 0.1, keep_norms=True, several_calls=several_calls)
        x = torch.randn(6, 4, dtype=torch.float64)
        square(model(x[:4])).sum().backward()
        if probed and place == "between microbatches":
            probe(model, torch.randn(2, 4, dtype=torch.float64))
        losses = square(model(x[4:]))
        if probed and place == "between forward and backward":
            probe(model, torch.randn(2, 4, dtype=torch.float64))
        losses.sum().backward()
        norms = training.sample_norms()
        counts.append((training.samples, training.steps, {n: v.tolist() for n, v in norms.items()}))
        optimizer.step()
        sums.append(gradients_of(model))
    assert counts[0] == counts[1] and counts[0][0] == 6
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


def test_a_pass_that_fails_puts_everything_back():
    model = Drawing()
    training, _ = private(model, 1.0)
    with pytest.raises(RuntimeError):
        probe(model, torch.randn(5, 3))
    assert model.training and not model.drop.training
    square(model(torch.randn(5, 4))).sum().backward()
    assert training.samples == 5


def test_probes_in_a_backward_pass_are_refused():
    model = Drawing()
    private(model, 1.0)
    y = model(torch.randn(5, 4))
    y.register_hook(lambda _: probe(model, torch.randn(5, 4)) and None)
    with pytest.raises(RuntimeError, match="a backward pass is running"):
        y.sum().backward()


def test_a_preconditioner_is_told_after_parameters_are_updated():
    class Following:
        def __init__(self, model: nn.Module) -> None:
            self.seen, self.model = [], model

        def sides(self, layer: str):
            return IDENTITY

        def after_step(self) -> None:
            self.seen.append(self.model.weight.detach().clone())

    model = nn.Linear(4, 3)
    following = Following(model)
    training, optimizer = private(model, 1.0, preconditioner=following)
    for _ in range(3):
        square(model(torch.randn(5, 4))).sum().backward()
        optimizer.step()
        assert torch.equal(following.seen[-1], model.weight)
    assert len(following.seen) == 3
    training.detach()
    optimizer.step()
    assert len(following.seen) == 3
