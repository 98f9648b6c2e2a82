"""One random case: a model, records, a way to clip, factors, microbatches; and what it releases."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels
from dpkernels.engine.clipping import Adaptive, Automatic, Flat, PerLayer
from dpkernels.engine.sides import IDENTITY, Scale
from dpkernels.ops.factor import Diagonal, Full, LowRank
from dpkernels.precondition import Sides
from python_tests.engine.random_models.blocks import BY_POSITION, ORDINARY, VOCABULARY, F
from python_tests.engine.random_models.hostile import HOSTILE

SIZES = (1e-30, 1e-10, 1e-3, 1.0, 1.0, 30.0, 1e4, 1e8, 1e10, 1e20)
NOT_FINITE = (float("inf"), float("nan"))
BOUNDS = (1e-3, 1.0, 100.0)
Refused = (ValueError, RuntimeError, NotImplementedError)


class Model(nn.Module):
    """Blocks one after the other between a linear layer and a head."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(F, F), nn.Linear(F, 2)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return ``[B, T, 2]`` of states ``[B, T, F]`` and tokens ``[B, T]``."""
        h = self.first(x)
        for block in self.blocks:
            h = block(h, tokens)
        return self.head(h)


@dataclass(frozen=True)
class Records:
    """States ``[B, T, F]``, tokens ``[B, T]``, weights of losses ``[B]``, microbatches ``[B]``.

    extreme: the record whose states are of no ordinary size, if there is one.
    """

    x: Tensor
    tokens: Tensor
    weights: Tensor
    parts: Tensor
    extreme: int | None = None

    def __len__(self) -> int:
        return len(self.x)

    def at(self, index: Tensor) -> Records:
        return Records(self.x[index], self.tokens[index], self.weights[index], self.parts[index])

    def removed(self, record: int) -> Records:
        return self.at(torch.arange(len(self)) != record)

    def nulled(self, record: int) -> Records:
        """Return the batch with zeros in place of a record, whose loss counts zero times.

        Its part of the sum is exactly zero, as if it were removed, and the batch is as long as
        before: the others' forward passes are the same to the last bit.
        """
        x, tokens, weights = self.x.clone(), self.tokens.clone(), self.weights.clone()
        x[record], tokens[record], weights[record] = 0, 0, 0
        return Records(x, tokens, weights, self.parts)


class Random(random.Random):
    """Choices of one seed."""

    def one(self, *options: Any) -> Any:
        return self.choice(options)


@dataclass
class Case:
    """What is trained and how; ``kinds`` are the names of its blocks."""

    kinds: tuple[str, ...]
    model: nn.Module
    records: Records
    clipping: Callable[[], Any]
    sides: dict[str, Sides]
    reduction: str
    saliency: str
    same: bool

    @property
    def must_train(self) -> bool:
        """Whether a refusal is a failure."""
        return all(kind in ORDINARY for kind in self.kinds)

    def sides_of(self, layer: str) -> Sides:
        return self.sides.get(layer, IDENTITY)


class _Preconditioner:
    """Factors by the name of a layer; none for layers that share a weight."""

    def __init__(self, sides: dict[str, Sides]) -> None:
        self._sides = sides

    def sides(self, layer: str) -> Sides:
        return self._sides.get(layer, IDENTITY)


def made(seed: int, dtype: torch.dtype, kinds: tuple[str, ...] | None = None) -> Case:
    """Return the case of a seed; kinds: its blocks, drawn if None."""
    draw = Random(seed)
    torch.manual_seed(seed)
    if kinds is None:
        kinds = drawn_kinds(draw)
    batch = draw.one(2, 3, 3, 4)
    parts = torch.tensor([draw.randrange(draw.one(1, 1, 2, 3)) for _ in range(batch)])
    largest = int(parts.bincount().max())
    least = 2 if any("instance" in kind or "batch" in kind for kind in kinds) else 1
    # One position of one record is nothing to normalise.
    positions = max(least, draw.one(1, 2, 3, 5, largest, largest))
    records = _records(draw, parts, positions, dtype)
    model = Model(_block(kind, positions) for kind in kinds).to(dtype).train()
    bound = draw.one(*BOUNDS)
    return Case(
        kinds=kinds,
        model=model,
        records=records,
        clipping=draw.one(
            lambda: Flat(bound),
            lambda: Flat(bound),
            lambda: PerLayer(bound),
            lambda: Automatic(bound),
            lambda: Automatic(bound, 0.0),
            lambda: Adaptive(bound, count_std=1e-9),
        ),
        sides=_sides(draw, model, dtype),
        reduction=draw.one("sum", "mean"),
        saliency=draw.one("none", "none", "grad", "backward", "evaluation"),
        same=draw.random() < 0.2,
    )


def drawn_kinds(draw: Random) -> tuple[str, ...]:
    """Return one to three kinds; in a third of the cases one that is not ordinary among them."""
    kinds = [draw.one(*ORDINARY) for _ in range(draw.one(1, 2, 3))]
    if draw.random() < 0.35:
        kinds[draw.randrange(len(kinds))] = draw.one(*BY_POSITION, *HOSTILE)
    return tuple(kinds)


def _block(kind: str, positions: int) -> nn.Module:
    if kind in BY_POSITION:
        return BY_POSITION[kind](positions)
    return (ORDINARY | HOSTILE)[kind]()


def _records(draw: Random, parts: Tensor, positions: int, dtype: torch.dtype) -> Records:
    """Return ordinary records, all clipped, and one that may be extreme or cancel."""
    batch = len(parts)
    x = torch.randn(batch, positions, F, dtype=dtype)
    tokens = torch.randint(VOCABULARY, (batch, positions))
    weights = torch.full((batch,), 1e4, dtype=dtype)
    odd = draw.randrange(batch)
    x[odd] *= draw.one(*SIZES, *SIZES, *NOT_FINITE)
    weights[odd] = draw.one(*SIZES) * draw.one(-1, 1)
    kind = draw.one("as drawn", "one token", "palindrome", "range", "equal states")
    if kind == "one token":
        tokens[odd] = 3
    elif kind == "palindrome":
        tokens[odd] = torch.minimum(torch.arange(positions), torch.arange(positions).flip(0))
    elif kind == "range":
        tokens[:, 0] = torch.arange(batch)
    elif kind == "equal states":
        x[odd] = x[odd, :1]
    ordinary = 1e-3 <= float(x[odd].abs().max()) <= 1e3
    return Records(x, tokens, weights, parts, None if ordinary else odd)


def _sides(draw: Random, model: nn.Module, dtype: torch.dtype) -> dict[str, Sides]:
    """Return factors for linear layers, or scales for layers of torch.nn, or nothing."""
    choice = draw.one("none", "none", "factors", "scales")
    shared = _shared(model)
    found = {}
    for name, module in model.named_modules():
        own = {k: p for k, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not own or shared & set(map(id, own.values())):
            continue
        if choice == "factors" and type(module) is nn.Linear:
            outputs, inputs = module.weight.shape
            both = inputs + (module.bias is not None)
            found[name] = Sides(_factor(draw, outputs, dtype), _factor(draw, both, dtype))
        elif choice == "scales" and type(module) in (nn.Linear, nn.Conv1d, nn.Embedding):
            values = {k: 10 ** torch.empty_like(p).uniform_(-3, 3) for k, p in own.items()}
            found[name] = Sides(scale=Scale({k: v.detach() for k, v in values.items()}))
    return found


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules have, or that attention reads itself."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=isinstance(module, nn.MultiheadAttention)):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}


def _factor(draw: Random, size: int, dtype: torch.dtype) -> Any:
    basis = torch.linalg.qr(torch.randn(size, size, dtype=dtype))[0]
    values = 10 ** torch.empty(size, dtype=dtype).uniform_(-2, 2)
    kind = draw.one("none", "full", "diagonal", "low rank")
    if kind == "full":
        return Full(((basis * values) @ basis.mT).contiguous())
    if kind == "diagonal":
        return Diagonal(values)
    if kind == "low rank":
        rank = min(2, size)
        return LowRank(basis[:, :rank].contiguous(), values[:rank].clone(), 0.7)
    return None


def losses(case: Case, model: nn.Module, part: Records) -> Tensor:
    """Return the loss of a microbatch."""
    output = model(part.x, part.tokens)
    own = output.flatten(1).sum(1) * part.weights
    return own.sum() if case.reduction == "sum" else own.mean()


def train(case: Case, model: nn.Module, records: Records) -> None:
    """Run all passes of a step, input gradients and evaluations among them."""
    for number in records.parts.unique().tolist():
        part = records.at(records.parts == number)
        if case.saliency in ("grad", "backward"):
            x = part.x.clone().requires_grad_()
            loss = losses(case, model, Records(x, part.tokens, part.weights, part.parts))
            if case.saliency == "grad":
                torch.autograd.grad(loss, x)
            else:
                loss.backward(inputs=[x])
        elif case.saliency == "evaluation":
            with torch.no_grad():
                losses(case, model, part)
        losses(case, model, part).backward()


def runs_plainly(case: Case) -> None:
    """Raise what the case itself does wrong: nothing that is refused later is a mistake of it."""
    train(case, copy.deepcopy(case.model), case.records)


def released(case: Case, records: Records) -> tuple[Tensor, float]:
    """Return the sum that a step releases without noise, as float64, and its sensitivity.

    Asserts that the step changes nothing else of the model.
    """
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    options: dict[str, Any] = {"several_calls": "same samples"} if case.same else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = dpkernels.make_private(
            model,
            optimizer,
            noise_multiplier=0.0,
            max_grad_norm=case.clipping(),
            expected_batch_size=4.0,
            loss_reduction=case.reduction,
            preconditioner=_Preconditioner(case.sides),
            **options,
        )
        train(case, model, records)
        sensitivity = training.sensitivity
        optimizer.step()
    assert (changed := changed_state(model, case.model)) == [], f"{case.kinds}: writes {changed}"
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    total = torch.cat([g.double().flatten() for g in gradients if g is not None])
    return total * training.expected_batch_size, sensitivity


def changed_state(model: nn.Module, before: nn.Module) -> list[str]:
    """Return the names of buffers and frozen parameters that are not what they were."""
    trained = {name for name, p in before.named_parameters() if p.requires_grad}
    then, now = before.state_dict(), model.state_dict()
    return [k for k in then if k not in trained and not torch.equal(then[k], now[k])]
