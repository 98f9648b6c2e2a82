"""Fisher information of a trained model, by passes through the engine's capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Generator, Tensor, nn

from dpkernels.engine.capture import Captured, Pass
from dpkernels.engine.distributed import group_of
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.probing import probing, undisturbed
from dpkernels.fisher.errors import Errors, Expectation, Loss, output_errors
from dpkernels.fisher.information import Diagonal, Fisher, Kronecker
from dpkernels.fisher.layer_sums import LayerSums, sums_of

Kind = Literal["kronecker", "diagonal"]
Inputs = Tensor | Sequence[Tensor]
Layout = Callable[[Tensor], Tensor]

# The engine tries a model out on the first batch that it sees, for about seven training passes: on
# so many records, that costs nothing.
_TRIED_RECORDS = 8


def fisher_information(
    model: nn.Module,
    batches: Iterable[Inputs],
    *,
    kind: Kind = "kronecker",
    expectation: Expectation = "rademacher",
    loss: Loss = "cross_entropy",
    generator: Generator | None = None,
) -> Fisher:
    """Return F = mean over records of E_{y ~ model}[score score^T], without a label.

    model: in private training or not; called in evaluation mode, and nothing of it changes. Its
        outputs are logits ``[B, C]``, or with ``squared`` anything ``[B, ...]``.
    batches: inputs, ``model(x)`` or ``model(*tensors)``, records first; moved to the device and, if
        they are not integers, the dtype of the model's parameters. F is the mean over records,
        however they are cut into batches, which should be large: 256 records or more.
    kind: ``kronecker``: ``Kronecker`` for linear layers, convolutions without groups, and the
        products that recurrent networks and attention are made of. What has no factors gets a
        ``Diagonal`` there, too: embeddings, whose factor would be a matrix over the vocabulary,
        norms, convolutions with groups, transposed ones, bare parameters. ``diagonal``: for all.
    expectation: over the model's own labels (``dpkernels.fisher.errors``). ``exact``: a backward
        pass for each class but one, or each output. ``sampled``, ``rademacher``: one, unbiased.
    loss: ``squared``: half the squared error, of which F is the Gauss-Newton matrix, mean of
        J^T J.
    generator: for ``sampled`` and ``rademacher``; None: one of its own, seeded with 0.

    Layers that share a weight have no F, nor have those that no record reaches: ``without`` names
    them. Diagonals are exact but for the expectation; Kronecker factors are where a layer has one
    position and errors do not depend on its activations (deep linear networks, squared loss).

    A forward and a backward pass without weight gradients, and B T (n^2 + m^2) flops for a layer
    of n inputs and m outputs at T positions; ``diagonal`` takes a weight gradient's B T n m. Where
    that is too much, F of a random part of the records is an unbiased estimate.

    Raises Unsupported for a model that ``make_private`` refuses, ValueError for wrong arguments, no
    records, outputs of another shape, and for what is not finite, naming the layer.
    """
    if kind not in get_args(Kind):
        raise ValueError(
            f"fisher_information: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}"
        )
    own = Generator().manual_seed(0) if generator is None else generator
    return information(model, batches, output_errors(loss, expectation, own), kind)


def information(model: nn.Module, batches: Iterable[Inputs], errors: Errors, kind: Kind) -> Fisher:
    """Return F for any errors, as many for each batch: the mean over them takes the place of E."""
    model, _ = group_of(model, None)
    sums: dict[Layer, LayerSums] = {}
    records, passes, again = 0, 0, False
    layout: Layout | None = None

    def layer_complete(current: Pass, layer: Layer, captured: Captured) -> None:
        try:
            sums[layer].update(captured, again)
        except ValueError as error:
            raise ValueError(f"fisher_information: {layer.describe()}: {error}") from error

    def pass_complete(current: Pass) -> None:
        for layer, uses in current.uses.items():
            if layer in sums:
                layer_complete(current, layer, layer.merged(uses))
        # Other errors of the same records may go through this call of the model.
        current.uses.clear()
        current.task = None

    names = _names(model)
    with probing(model, layer_complete, pass_complete) as layers, undisturbed(model):
        for layer in layers:
            if not layer.shared:
                own = {key: names[parameter][0] for key, parameter in layer.parameters.items()}
                sums[layer] = sums_of(layer, kind, own)
        for batch in batches:
            inputs = _inputs(model, batch)
            if len(inputs[0]) == 0:
                continue
            if layout is None:
                layout = _layout_of(model, inputs)
            outputs = _check_outputs(model(*map(layout, inputs)))
            count = 0
            for d in errors(outputs):
                again = count > 0
                outputs.backward(d, retain_graph=True)
                count += 1
            if records and count != passes:
                raise ValueError(
                    "fisher_information: outputs must be of one size in all batches with "
                    f"expectation='exact', got {passes} errors for a batch and {count} for another"
                )
            records, passes = records + len(outputs), count
    if records == 0:
        raise ValueError("fisher_information: batches hold no records")
    found: dict[str, Kronecker | Diagonal] = {}
    for one in sums.values():
        found |= one.blocks(records, passes)
    covered = {name for one in found.values() for name in one.parameters}
    return Fisher(found, _without(names, layers, covered), records)


def _inputs(model: nn.Module, batch: Inputs) -> list[Tensor]:
    """Return the inputs of a batch beside the model's parameters."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    given = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    return [x.to(like.device, like.dtype if x.is_floating_point() else None) for x in given]


def _layout_of(model: nn.Module, inputs: Sequence[Tensor]) -> Layout:
    """Try the model out on a few records; return the layout of images that it takes.

    On a CPU, channels go last if the model lets them, which only a ``view`` of its own may not:
    convolutions and pooling are then up to twice as fast.
    """
    size = len(inputs[0])
    few = [x[:_TRIED_RECORDS] if x.dim() and len(x) == size else x for x in inputs]
    if any(x.dim() == 4 and x.is_cpu for x in inputs):
        try:
            model(*map(_channels_last, few))
            return _channels_last
        except RuntimeError:
            pass
    model(*few)
    return _as_it_is


def _channels_last(x: Tensor) -> Tensor:
    if x.dim() != 4 or not x.is_cpu:
        return x
    # ``contiguous`` would leave a single channel as it is, whose strides say nothing to a layer.
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _check_outputs(outputs: object) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        raise ValueError(
            "fisher_information: a model must return one tensor of outputs, records first, got "
            f"{type(outputs).__name__}; wrap it in a module that does"
        )
    return outputs


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of every trained parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return names


def _without(
    names: Mapping[nn.Parameter, list[str]], layers: Sequence[Layer], covered: set[str]
) -> dict[str, str]:
    """Return why parameters have no F, by all their names."""
    owners = {p: layer for layer in layers for p in layer.parameters.values()}
    found: dict[str, str] = {}
    for parameter, own in names.items():
        if covered.isdisjoint(own):
            layer = owners.get(parameter)
            if layer is None:
                why = "no layer that can be followed has it"
            elif layer.shared:
                why = f"{layer.describe()} shares a parameter with another layer"
            else:
                why = f"no record reached {layer.describe()}"
            found |= dict.fromkeys(own, why)
    return found
