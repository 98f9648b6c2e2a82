"""Passes through a model that are not about anybody's data, and leave nothing behind in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from dpkernels.engine.capture import Capture, Captured, Pass, flattened
from dpkernels.engine.in_place import capture_of
from dpkernels.engine.layers.layer import Layer
from dpkernels.engine.layers.tied import tie
from dpkernels.engine.rules import check_plain, layers_of


@contextmanager
def probing(
    model: nn.Module,
    layer_complete: Callable[[Pass, Layer, Captured], None],
    pass_complete: Callable[[Pass], None],
) -> Iterator[Sequence[Layer]]:
    """Let forward and backward passes inside deliver as those of training do, but to the caller.

    model: in private training, whose sums, counts and unfinished passes stay as they are; or not,
        then its layers are followed for as long as this lasts. Without DistributedDataParallel.
    layer_complete: gets what a layer that was called once has captured, as soon as it is there.
    pass_complete: called at the end of a backward pass; ``uses`` holds the other layers.

    Yields the trained layers. Raises Unsupported as ``make_private`` does.
    """
    capture = capture_of(model)
    if capture is not None:
        layers = capture.layers
        with capture.redirected(layer_complete, pass_complete):
            yield layers
        return
    check_plain(model)
    modules = layers_of(model)
    layers = tuple(flattened(modules))
    tie(layers)
    detach = Capture(layer_complete, pass_complete).attach(model, modules)
    try:
        yield layers
    finally:
        detach()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run passes in evaluation mode and without autocast; put everything back afterwards.

    Put back are the modes of all modules, buffers that a forward pass writes to, and torch's global
    generators. Without dropout, what comes out depends on parameters and inputs alone.
    """
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.enable_grad())
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, name, buffer, version, before in buffers:
                # A write would break graphs that have saved it: only where there was one.
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(before)
                module._buffers[name] = buffer
