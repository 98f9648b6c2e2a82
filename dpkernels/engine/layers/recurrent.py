"""``nn.RNN``, ``nn.GRU``, ``nn.LSTM``: each layer and direction is two products, or three.

``nn.RNNCell``, ``nn.GRUCell`` and ``nn.LSTMCell`` are one step of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from dpkernels.engine.capture import Captured, Site
from dpkernels.engine.layers.layer import Layer, Norms
from dpkernels.engine.layers.linear import computing_dtype
from dpkernels.engine.layers.packed import Padding
from dpkernels.engine.layers.product import Product
from dpkernels.engine.layers.recurrent_cells import Cell, Elman, Gru, Lstm, Weights, shifted
from dpkernels.engine.sides import Sides
from dpkernels.ops.ghost.plan import Plan

_PARTS = ("ih", "hh", "hr")


class CapturedRecurrence(torch.autograd.Function):
    """One layer in one direction, whose backward pass delivers for each of its products."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: Cell,
        reverse: bool,
        sites: Mapping[str, Site],
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        padded: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs ``[B, T, P]`` and, of an LSTM, the last cell ``[B, H]``.

        x: ``[B, T, I]``. h, c: initial states. padded: bool ``[B, T]``, True after the end of a
        sequence, or None; with it, outputs there are 0, and an LSTM's cells of all steps are
        returned, ``[B, T, H]``. parameters: weight_ih, weight_hh, weight_hr, bias_ih and bias_hh,
        some of which may be None.
        """
        ctx.cell, ctx.sites = cell, sites
        ctx.dtypes = [x.dtype, h.dtype, None if c is None else c.dtype]
        steps = x.shape[1]
        ctx.order = order = range(steps - 1, -1, -1) if reverse else range(steps)
        dtype = computing_dtype(x)
        tensors: list[Any] = [None if p is None else p.to(dtype) for p in (x, h, c, *parameters)]
        x, h, c, w_ih, w_hh, w_hr, b_ih, b_hh = tensors
        if cell.joint_bias and b_ih is not None:
            b_ih, b_hh = b_ih + b_hh, None
        gates = functional.linear(x, w_ih, b_ih)
        outputs, saved = cell.forward(gates, h, c, Weights(w_hh, b_hh, w_hr), order)
        if padded is not None:
            # States go on after the end and may overflow there: 0 times that is not 0.
            for kept in (outputs, *saved):
                kept.masked_fill_(padded.unsqueeze(-1), 0.0)
        ctx.save_for_backward(x, h, c, w_ih, w_hh, w_hr, outputs, *saved)
        if not cell.has_cell:
            return outputs, None
        cells = saved[-1]
        return outputs, (cells[:, order[-1]] if padded is None else cells).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_cell: Tensor | None) -> tuple[Any, ...]:
        """Deliver, and return gradients of inputs and initial states only."""
        x, h, c, w_ih, w_hh, w_hr, outputs, *saved = ctx.saved_tensors
        weights = Weights(w_hh, hr=w_hr)
        errors = ctx.cell.backward(d_outputs, d_cell, outputs, h, c, saved, weights, ctx.order)
        if "ih" in ctx.sites:
            ctx.sites["ih"].deliver(x, errors.inputs)
        if "hh" in ctx.sites:
            ctx.sites["hh"].deliver(shifted(outputs, h, ctx.order), errors.states)
        if "hr" in ctx.sites:
            ctx.sites["hr"].deliver(errors.hidden, errors.outputs)
        d_x = errors.inputs @ w_ih if ctx.needs_input_grad[3] else None
        gradients = [
            None if d is None else d.to(dtype)
            for d, dtype in zip((d_x, errors.h, errors.c), ctx.dtypes, strict=True)
        ]
        return None, None, None, *gradients, *[None] * 6


captured_recurrence: Callable[..., tuple[Tensor, Tensor | None]] = CapturedRecurrence.apply


class RecurrentLayer(Layer):
    """All layers and directions of a recurrent network; their products are the sublayers.

    The product of the inputs (``ih_l0``) has weight_ih and bias_ih, that of the states (``hh_l0``)
    weight_hh and bias_hh, that of a projected output (``hr_l0``) weight_hr; ``_reverse`` is
    appended for the second direction.
    """

    rule = "recurrent"

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(name, module, parameters)
        self._cell = _cell_of(module)
        directions = ("", "_reverse") if self.module.bidirectional else ("",)
        self._suffixes = [
            f"l{layer}{direction}"
            for layer in range(self.module.num_layers)
            for direction in directions
        ]
        prefix = f"{name}." if name else ""
        products = {
            (part, suffix): Product(
                f"{prefix}{part}_{suffix}",
                module,
                getattr(module, f"weight_{part}_{suffix}", None),
                getattr(module, f"bias_{part}_{suffix}", None),
            )
            for suffix in self._suffixes
            for part in _PARTS
        }
        self._products = {key: product for key, product in products.items() if product.parameters}
        self.sublayers = tuple(self._products.values())

    def forward(
        self, site: Site, plain: Callable[..., Any], input: Tensor | PackedSequence, hx: Any = None
    ) -> tuple[Tensor | PackedSequence, Any]:
        """Compute outputs of all steps, and the last states."""
        module = self.module
        padding: Padding | None = None
        if isinstance(input, PackedSequence):
            x, padding = Padding.of(input)
        else:
            self._check_input(input)
            x = input if module.batch_first else input.transpose(0, 1)
        states = self._initial_states(input, x, hx)
        directions = 2 if module.bidirectional else 1
        last: list[tuple[Tensor, ...]] = []
        for first in range(0, len(self._suffixes), directions):
            outputs = []
            for index in range(first, first + directions):
                each = [state[index] for state in states]
                y, ends = self._run(site, index, x, each, padding)
                outputs.append(y)
                last.append(ends)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if module.dropout and module.training and first + directions < len(self._suffixes):
                x = functional.dropout(x, module.dropout)
        finals = tuple(torch.stack(state) for state in zip(*last, strict=True))
        if padding is not None:
            output: Tensor | PackedSequence = padding.repacked(x)
        else:
            output = x if module.batch_first else x.transpose(0, 1)
        return output, finals if self._cell.has_cell else finals[0]

    def _run(
        self,
        site: Site,
        index: int,
        x: Tensor,
        states: list[Tensor],
        padding: Padding | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one layer in one direction; return all outputs, and the last states."""
        suffix = self._suffixes[index]
        names = ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")
        parameters = [getattr(self.module, f"{name}_{suffix}", None) for name in names]
        sites = {
            part: site.of(self._products[part, suffix])
            for part in _PARTS
            if (part, suffix) in self._products
        }
        h, c = states if self._cell.has_cell else (states[0], None)
        reverse = suffix.endswith("_reverse")
        if padding is None:
            y, cell = captured_recurrence(self._cell, reverse, sites, x, h, c, None, *parameters)
            end = y[:, 0 if reverse else -1]
            return y, (end,) if cell is None else (end, cell)
        # Backwards from its own end, a sequence never meets its padding.
        x = padding.reversed(x) if reverse else x
        y, cells = captured_recurrence(
            self._cell, False, sites, x, h, c, padding.padded, *parameters
        )
        ends = (padding.last(y),) if cells is None else (padding.last(y), padding.last(cells))
        return (padding.reversed(y) if reverse else y), ends

    def _check_input(self, x: Any) -> None:
        if x.is_nested or x.dim() != 3 or x.shape[1 if self.module.batch_first else 0] == 0:
            raise RuntimeError(
                f"{self.describe()}: its input must be a plain tensor of 3 axes, samples and at "
                "least one step among them; pad sequences to one length"
            )

    def _initial_states(
        self, given: Tensor | PackedSequence, x: Tensor, hx: Any
    ) -> tuple[Tensor, ...]:
        """Return h, and c of an LSTM, each ``[layers * directions, B, *]``.

        given: the module's input. x: ``[B, T, I]``.
        """
        module = self.module
        if hx is None:
            batch, widths = x.shape[0], [module.hidden_size]
            if self._cell.has_cell:
                widths.insert(0, module.proj_size or module.hidden_size)
            states = tuple(x.new_zeros(len(self._suffixes), batch, width) for width in widths)
            hx = states if self._cell.has_cell else states[0]
        if isinstance(given, PackedSequence):
            module.check_forward_args(given.data, hx, given.batch_sizes)
        else:
            module.check_forward_args(given, hx, None)
        return tuple(hx) if self._cell.has_cell else (hx,)

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Raise: the sublayers have norms."""
        raise NotImplementedError

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Raise: the sublayers have plans."""
        raise NotImplementedError


class CellLayer(Layer):
    """One step of a recurrent network: products ``ih`` of the input and ``hh`` of the state.

    Called once for each step, as a rule; the steps are the positions of both products.
    """

    rule = "recurrent cell"

    def __init__(
        self, name: str, module: nn.Module, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(name, module, parameters)
        self._cell = _cell_of(module)
        prefix = f"{name}." if name else ""
        products = {
            part: Product(
                prefix + part,
                module,
                getattr(module, f"weight_{part}"),
                getattr(module, f"bias_{part}"),
            )
            for part in ("ih", "hh")
        }
        self._products = {part: product for part, product in products.items() if product.parameters}
        self.sublayers = tuple(self._products.values())

    def forward(
        self, site: Site, plain: Callable[..., Any], input: Tensor, hx: Any = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the next state, and the next cell of an LSTM."""
        module, count = self.module, 2 if self._cell.has_cell else 1
        wanted = (input.shape[0], module.hidden_size)
        if hx is None:
            states = [input.new_zeros(wanted)] * count
        else:
            states = list(hx) if self._cell.has_cell else [hx]
        if input.dim() != 2 or any(state.shape != wanted for state in states):
            raise RuntimeError(
                f"{self.describe()}: its input must be [samples, {module.input_size}] and its "
                f"states [samples, {module.hidden_size}], got {list(input.shape)} and "
                f"{[list(state.shape) for state in states]}"
            )
        sites = {part: site.of(product) for part, product in self._products.items()}
        h, c = (*states, None)[:2]
        weights = module.weight_ih, module.weight_hh, None, module.bias_ih, module.bias_hh
        y, cell = captured_recurrence(
            self._cell, False, sites, input.unsqueeze(1), h, c, None, *weights
        )
        return y.squeeze(1) if cell is None else (y.squeeze(1), cell)

    def norms(self, captured: Captured, sides: Sides) -> Norms:
        """Raise: the sublayers have norms."""
        raise NotImplementedError

    def plan(self, captured: Captured, sides: Sides) -> Plan:
        """Raise: the sublayers have plans."""
        raise NotImplementedError


def _cell_of(module: nn.Module) -> Cell:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return Lstm()
    if isinstance(module, nn.GRU | nn.GRUCell):
        return Gru()
    return Elman(relu=module.nonlinearity == "relu")
