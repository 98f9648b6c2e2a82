"""What several processes with copies of one model do, by DDP or a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpkernels
from dpkernels.engine import Ranks, distributed
from dpkernels.engine.clipping import Adaptive
from python_tests.engine.distributed.processes import (
    backward,
    ddp,
    error_of,
    gradients,
    one_step,
    own_part,
    three_steps,
    with_options,
)
from python_tests.engine.models import made
from python_tests.engine.oracle import median_norm, sample_gradients, square

MODELS = ("linear", "conv2d", "tied", "embedding")
BOUND = 0.2
SIGMA, EXPECTED = 1.5, 8.0
WIDE = (300, 400)


def bound_of(name: str) -> float:
    """Return a norm that some of the samples exceed, and others do not."""
    model, inputs = made(name)
    return 1.01 * median_norm(sample_gradients(model, inputs))


def world() -> Any:
    """Return the group of all processes."""
    return dist.group.WORLD


def sums() -> dict[str, dict[str, Tensor]]:
    """Return gradients without noise of each model, in several ways."""
    found = {}
    for name in MODELS:
        bound = bound_of(name)
        found[f"ddp {name}"] = one_step(name, ddp, bound)
        found[f"group {name}"] = one_step(name, lambda m: m, bound, process_group=world())
        found[f"mean {name}"] = one_step(name, ddp, bound, loss_reduction="mean")
    return found


def empty_call() -> dict[str, Tensor]:
    """Return gradients where a rank without samples calls the model all the same."""
    model, inputs = made("linear")
    model = ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_options(model, optimizer, loss_reduction="mean")
    square(model(*own_part(inputs))).mean().backward()
    optimizer.step()
    return gradients(model)


def trained() -> dict[str, Tensor]:
    """Return parameters after three steps."""
    model, inputs = made("linear")
    return three_steps(ddp(model), inputs, backward)


def wide(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a layer of 120,000 float32 weights in noisy training."""
    torch.manual_seed(0)
    model = ddp(nn.Linear(WIDE[1], WIDE[0], bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"noise_multiplier": SIGMA, "expected_batch_size": EXPECTED} | options
    return model, optimizer, with_options(model, optimizer, **options)


def noise() -> list[Tensor]:
    """Return the gradients of two steps without samples, and one of a seeded key."""
    model, optimizer, _ = wide()
    found = []
    for _ in range(2):
        optimizer.step()
        found.append(gradients(model)["weight"])
    model, optimizer, _ = wide(noise_key=dpkernels.NoiseKey.from_seed(3))
    optimizer.step()
    return [*found, gradients(model)["weight"]]


def noise_of_one_seed() -> Tensor:
    """Return the gradient if every rank had the same key, which is the bug."""
    plain = Ranks.own_key
    Ranks.own_key = lambda self, key: key
    try:
        model, optimizer, _ = wide(noise_key=dpkernels.NoiseKey.from_seed(3))
        optimizer.step()
    finally:
        Ranks.own_key = plain
    return gradients(model)["weight"]


def keys() -> tuple[int, int]:
    """Return key and counter of this rank, from a seed that all have."""
    key = wide(noise_key=dpkernels.NoiseKey.from_seed(3))[2].noise_key
    return key.key, key.counter


def sent() -> dict[str, Any]:
    """Return what leaves this process in a step of three microbatches, and its own sum."""
    model, optimizer, _ = wide()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(6, WIDE[1], generator=generator)
    alone = nn.Linear(WIDE[1], WIDE[0], bias=False)
    alone.load_state_dict(model.module.state_dict())
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    with_options(alone, own, expected_batch_size=1.0)
    messages = []
    plain = dist.all_reduce

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        messages.append(tensor.clone())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    try:
        for part in x.split(2):
            square(model(part)).sum().backward()
        before = len(messages)
        optimizer.step()
    finally:
        dist.all_reduce = plain
    square(alone(x)).sum().backward()
    own.step()
    floats = [message for message in messages if message.is_floating_point()]
    return {"before": before, "floats": floats, "own": alone.weight.grad.flatten()}


def bounds() -> tuple[float, float]:
    """Return C of adaptive clipping after a step, with hardly any noise and with much of it."""
    found = []
    for std in (1e-9, 10.0):
        model, inputs = made("linear")
        model = ddp(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = with_options(
            model, optimizer, max_grad_norm=Adaptive(bound_of("linear"), count_std=std)
        )
        backward(model, inputs)
        optimizer.step()
        found.append(training.sensitivity)
    return found[0], found[1]


def disagreements() -> dict[str, str]:
    """Return what ``make_private`` says where the last rank has other arguments."""
    last = dist.get_rank() == dist.get_world_size() - 1
    given: dict[str, dict[str, Any]] = {
        "noise_multiplier": {"noise_multiplier": 2.0 if last else 1.0},
        "expected_batch_size": {"expected_batch_size": 7.0 if last else 3.0},
        "loss_reduction": {"loss_reduction": "mean" if last else "sum"},
        "max_grad_norm": {"max_grad_norm": 0.3 if last else 0.2},
    }
    found = {}
    for name, options in given.items():
        model, _ = made("linear")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found[name] = error_of(
            lambda m=model, o=optimizer, x=options: with_options(m, o, process_group=world(), **x)
        )
        assert not any("forward" in vars(module) for module in model.modules())
    for name, model in {
        "parameter 0.weight": nn.Sequential(nn.Linear(5, 3 if last else 4)),
        "parameter 1.bias": nn.Sequential(nn.Tanh(), nn.Linear(5, 3, bias=last)),
    }.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.init.zeros_(next(model.parameters()))
        found[name] = error_of(
            lambda m=model, o=optimizer: with_options(m, o, process_group=world())
        )
    other = nn.Linear(3, 3)
    nn.init.constant_(other.weight, float(last))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    found["parameter weight"] = error_of(
        lambda: with_options(other, optimizer, process_group=world())
    )
    return found


class Interrupted(RuntimeError):
    """What a listener, or the network, raises."""


def interruptions() -> dict[str, Any]:
    """Return errors and gradients of steps that fail on one rank, or all, and of steps after."""
    last = dist.get_rank() == dist.get_world_size() - 1
    model, inputs = made("linear")
    model = ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = with_options(model, optimizer)

    def refuse() -> None:
        raise Interrupted("no budget left")

    found: dict[str, Any] = {}
    taken = 0

    def broken_step(name: str, **arguments: Any) -> None:
        optimizer.zero_grad()
        for _ in range(2):  # samples that must not be in a later step
            backward(model, inputs)
        error = error_of(lambda: optimizer.step(**arguments))
        found[name] = error, gradients(model), training.steps - taken

    stop = training.before_release(refuse) if last else (lambda: None)
    broken_step("listener")
    stop()
    if last:
        training.noise_multiplier = 1.0
    broken_step("schedule")
    training.noise_multiplier = 0.0
    broken_step("closure", **({"closure": lambda: 0.0} if last else {}))
    if last:
        optimizer.grad_scale = torch.ones(())
    broken_step("scaler")
    if last:
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    broken_step("added parameter")
    del optimizer.param_groups[0]["params"][len([*model.parameters()]) :]
    optimizer.zero_grad()
    backward(model, inputs)
    optimizer.step()
    found["after"] = gradients(model), training.steps
    taken = 1
    plain = distributed.dist.all_reduce

    def lost(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            raise Interrupted("connection lost")
        return plain(tensor, *args, **kwargs)

    distributed.dist.all_reduce = lost
    broken_step("network")
    distributed.dist.all_reduce = plain
    broken_step("after the network")
    found["message after the network"] = error_of(training.ranks.gathered)
    return found


def states() -> dict[str, str]:
    """Return what loading the first rank's state says, with a seeded key and one of entropy."""
    found = {}
    for name, key in {"seed": dpkernels.NoiseKey.from_seed(3), "entropy": None}.items():
        training = wide(noise_key=key)[2]
        state = [training.state_dict()]
        dist.broadcast_object_list(state, src=0)
        found[name] = error_of(lambda t=training, s=state: t.load_state_dict(s[0]))
    return found


def detached() -> dict[str, Any]:
    """Return gradients of DDP itself after ``detach``, and this rank's own."""
    model, inputs = made("linear")
    model = ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_options(model, optimizer).detach()
    x = inputs[0][dist.get_rank() : dist.get_rank() + 2]
    square(model(x)).sum().backward()
    plain, _ = made("linear")
    square(plain(x)).sum().backward()
    return {"ddp": gradients(model), "own": gradients(plain), "class": "forward" in vars(model)}


def joined() -> str:
    """Return what a call inside of ``join()`` says."""
    model, inputs = made("linear")
    model = ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_options(model, optimizer)
    model._join_config = model._join_config._replace(enable=True)
    return error_of(lambda: model(*inputs))


def outsiders() -> str:
    """Return what is said where the group is of the first rank alone."""
    group = dist.new_group([0])
    model, _ = made("linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return error_of(lambda: with_options(model, optimizer, process_group=group))


ALL = [sums, trained, noise, keys, sent, bounds, disagreements, interruptions, states, detached]
ALL += [empty_call, noise_of_one_seed, joined, outsiders]
