"""Models that are convolutions, then linear layers, in a row: their layers, or why they are not."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from dpkernels.federated.local.chain import LINEAR_LAYERS, sequence
from dpkernels.ops.network_sgd import Layer, Window

_LAYERS = (*LINEAR_LAYERS, nn.Conv2d, nn.MaxPool2d)


def network_of(model: nn.Module, record: tuple[int, ...]) -> tuple[Layer, ...] | str:
    """Return the layers of ``model`` as ``network_epoch_`` takes them, or what is in the way.

    record: the shape of one record, ``[C, H, W]`` or ``[features]``. Taken is a (nested)
    ``nn.Sequential`` of Conv2d, MaxPool2d, ReLU, Tanh, Dropout, Flatten, Linear and Identity that
    ends with a Linear, every parameter trained and used once.
    """
    begins: dict[Tensor, int] = {}
    begin = 0
    for p in model.parameters():
        if not p.requires_grad:
            return "it has parameters that are not trained"
        begins[p], begin = begin, begin + p.numel()
    if len(record) not in (1, 3):
        return f"records of {len(record)} dimensions are neither flat nor images"
    found = _Network(record, begins)
    for module in sequence(model, _LAYERS):
        reason = module if isinstance(module, str) else found.add(module)
        if reason is not None:
            return reason
    last = found.layers[-1] if found.layers else None
    if last is None or last.kind != "linear" or last.activation != "none" or last.levels:
        return "it does not end with a Linear"
    return tuple(found.layers)


class _Network:
    """The layers so far, and the shape of what they make."""

    def __init__(self, record: tuple[int, ...], begins: dict[Tensor, int]) -> None:
        self.layers: list[Layer] = []
        self._begins, self._used = begins, set[nn.Module]()
        self._flat = len(record) == 1
        self._shape = (record[0], 1, 1) if self._flat else (record[0], record[1], record[2])

    def add(self, module: nn.Module) -> str | None:
        """Add one module; return why it cannot be, if so."""
        if isinstance(module, nn.Conv2d | nn.Linear):
            if module in self._used:
                return f"a {type(module).__name__} is used twice"
            self._used.add(module)
        if isinstance(module, nn.Conv2d):
            return self._convolution(module)
        if isinstance(module, nn.Linear):
            return self._linear(module)
        if isinstance(module, nn.MaxPool2d):
            return self._pool(module)
        if isinstance(module, nn.Flatten):
            return self._flatten(module)
        if isinstance(module, nn.Dropout):
            if module.training and module.p:
                last = self._last(self.layers and not self.layers[-1].levels)
                self.layers[-1] = last.dropping(float(module.p))
        elif isinstance(module, nn.ReLU | nn.Tanh):
            self._activation("relu" if isinstance(module, nn.ReLU) else "tanh")
        return None

    def _last(self, fits: object) -> Layer:
        """Return the last layer; if what comes next does not fit it, one that only passes on."""
        if not fits:
            self.layers.append(Layer("pass", self._shape, self._shape[0]))
        return self.layers[-1]

    def _activation(self, kind: str) -> None:
        # Both rise with their argument, so they may come after a pool or before it; ReLU may change
        # places with a mask, which is never negative.
        last = self.layers[-1] if self.layers else None
        fits = (
            last is not None and last.activation == "none" and (kind == "relu" or not last.levels)
        )
        last = self._last(fits)
        self.layers[-1] = replace(last, activation="relu" if kind == "relu" else "tanh")

    def _convolution(self, module: nn.Conv2d) -> str | None:
        if self._flat or module.in_channels != self._shape[0]:
            return f"a Conv2d takes {module.in_channels} channels, not what comes before it"
        if module.groups != 1 or module.dilation != (1, 1):
            return "a Conv2d has groups or dilation"
        if module.padding_mode != "zeros":
            return f"a Conv2d pads with {module.padding_mode}"
        size = _pair(module.kernel_size)
        if module.padding == "same":
            if size[0] % 2 == 0 or size[1] % 2 == 0:
                return "a Conv2d pads one side more than the other"
            padding = size[0] // 2, size[1] // 2
        else:
            padding = (0, 0) if module.padding == "valid" else _pair(module.padding)
        layer = Layer(
            "convolution",
            self._shape,
            module.out_channels,
            Window(size, _pair(module.stride), padding),
            self._begins[module.weight],
            None if module.bias is None else self._begins[module.bias],
        )
        return self._append(layer, "Conv2d")

    def _linear(self, module: nn.Linear) -> str | None:
        if not self._flat or module.in_features != self._shape[0]:
            return f"a Linear takes {module.in_features} features, not what comes before it"
        layer = Layer(
            "linear",
            self._shape,
            module.out_features,
            weight=self._begins[module.weight],
            bias=None if module.bias is None else self._begins[module.bias],
        )
        return self._append(layer, "Linear")

    def _append(self, layer: Layer, name: str) -> str | None:
        if min(layer.made) < 1:
            return f"a {name} is larger than its image"
        self.layers.append(layer)
        self._shape = layer.made
        return None

    def _pool(self, module: nn.MaxPool2d) -> str | None:
        if self._flat:
            return "a MaxPool2d takes what is flat"
        if _pair(module.dilation) != (1, 1) or module.ceil_mode or module.return_indices:
            return "a MaxPool2d has dilation, ceil_mode or return_indices"
        size = _pair(module.kernel_size)
        pool = Window(size, _pair(module.stride), _pair(module.padding))
        if size[0] * size[1] > 255:
            return "a MaxPool2d has more than 255 places"
        last = self._last(
            self.layers and self.layers[-1].pool == Window() and not self.layers[-1].levels
        )
        self.layers.pop()
        return self._append(replace(last, pool=pool), "MaxPool2d")

    def _flatten(self, module: nn.Flatten) -> str | None:
        if (module.start_dim, module.end_dim) != (1, -1):
            return "a Flatten leaves more than one axis"
        channels, height, width = self._shape
        self._flat, self._shape = True, (channels * height * width, 1, 1)
        return None


def _pair(value: object) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    assert isinstance(value, tuple)
    return int(value[0]), int(value[1])
