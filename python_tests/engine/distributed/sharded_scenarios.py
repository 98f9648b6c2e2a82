"""What processes do that share one model by ``fully_shard``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from python_tests.engine.distributed.processes import (
    error_of,
    gradients,
    own_part,
    three_steps,
    with_options,
)
from python_tests.engine.distributed.scenarios import BOUND, EXPECTED, SIGMA, WIDE, bound_of
from python_tests.engine.models import made
from python_tests.engine.oracle import square

# Tied weights must be in one group, that of the whole model.
SHARDED = {"linear": True, "conv2d": True, "embedding": True, "tied": False, "layer norm": True}


class Token(nn.Module):
    """A parameter of the module's own beside a layer, as a class token is."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 5))
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 3]``."""
        return self.linear(torch.tanh(x + self.token))


class Reached(nn.Module):
    """A weight that is used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 5]``."""
        return functional.linear(self.inner(x), self.inner.weight)


def token() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model with a bare parameter, and 7 samples, the same every time."""
    torch.manual_seed(0)
    return Token().double(), (torch.randn(7, 5, dtype=torch.float64),)


def mesh(*shape: int) -> Any:
    """Return the mesh of all processes; of two axes, the first is of copies."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])


def shard(model: nn.Module, children: bool, over: Any = None, **options: Any) -> nn.Module:
    """Return the model sharded, its children with parameters each on their own or not."""
    over = over or mesh()
    for child in model.children() if children else ():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def passes(model: nn.Module, inputs: Any) -> None:
    """Two backward passes on every rank, of no samples where there are none."""
    samples = own_part(inputs)
    half = samples[0].shape[0] // 2
    for part in (slice(half), slice(half, None)):
        square(model(*(x[part] for x in samples))).sum().backward()


def _sum(model: nn.Module, inputs: Any, bound: float) -> dict[str, Any]:
    """Return gradients of a step, before it and after it, and how they are sharded."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_options(model, optimizer, max_grad_norm=bound)
    passes(model, inputs)
    before = gradients(model)
    optimizer.step()
    as_parameters = all(
        p.grad.placements == p.placements and p.grad.to_local().shape == p.to_local().shape
        for p in model.parameters()
    )
    return {"before": before, "gradients": gradients(model), "as parameters": as_parameters}


def sharded_sums() -> dict[str, dict[str, Any]]:
    """Return gradients without noise of each model."""
    found = {}
    for name, children in SHARDED.items():
        model, inputs = made(name)
        found[name] = _sum(shard(model, children), inputs, bound_of(name))
    model, inputs = token()
    found["token"] = _sum(shard(model, False), inputs, BOUND)
    if dist.get_world_size() == 4:
        model, inputs = made("linear")
        found["two copies"] = _sum(shard(model, True, mesh(2, 2)), inputs, bound_of("linear"))
    return found


def sharded_training() -> dict[str, Tensor]:
    """Return parameters after three steps."""
    model, inputs = made("linear")
    return three_steps(shard(model, True), inputs, passes)


def sharded_noise() -> tuple[Tensor, Tensor]:
    """Return the gradients of two steps without samples."""
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(WIDE[1], WIDE[0], bias=False)), True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_options(model, optimizer, noise_multiplier=SIGMA, expected_batch_size=EXPECTED)
    found = []
    for _ in range(2):
        optimizer.step()
        found.append(gradients(model)["0.weight"])
    return found[0], found[1]


def half_precision() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients that layers compute in bfloat16: with shards, and this rank alone."""
    found = []
    for policy in (MixedPrecisionPolicy(param_dtype=torch.bfloat16), None):
        model, inputs = made("linear")
        model = shard(model.float(), True, mp_policy=policy) if policy else model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with_options(model, optimizer)
        if policy:
            passes(model, [inputs[0].float()])
        else:
            square(model(inputs[0].bfloat16())).sum().backward()
        optimizer.step()
        found.append(gradients(model))
    return found[0], found[1]


def sharded_refusals() -> dict[str, str]:
    """Return what is said of weights used outside of their layers, and of other DTensors."""
    torch.manual_seed(0)
    model = shard(Reached(), False)
    with_options(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = {"reached": error_of(lambda: square(model(torch.randn(2, 5))).sum().backward())}
    parts = Token()
    fully_shard(parts.linear, mesh=mesh())
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    found["own parameters"] = error_of(lambda: with_options(parts, optimizer))
    other = nn.Linear(4, 4)
    for name, parameter in list(other.named_parameters()):
        setattr(other, name, nn.Parameter(distribute_tensor(parameter.data, mesh(), [Shard(0)])))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    found["not fully_shard"] = error_of(lambda: with_options(other, optimizer))
    return found


def sharded_detached() -> dict[str, Tensor]:
    """Return gradients of FSDP itself after ``detach``, all ranks on the same samples."""
    model, inputs = made("linear")
    model = shard(model, True)
    training = with_options(model, torch.optim.SGD(model.parameters(), lr=0.1))
    passes(model, inputs)
    training.detach()
    square(model(*inputs)).sum().backward()
    return gradients(model)


ALL = [sharded_sums, sharded_training, sharded_noise, half_precision, sharded_refusals]
ALL += [sharded_detached]
