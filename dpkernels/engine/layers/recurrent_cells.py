"""Recurrent networks through time, forward and backward, for one layer in one direction.

Weight gradients are left out: what comes back are errors of all time steps at once. Whatever does
not depend on the step before is computed for all steps together, outside of the loops.

Shapes: B samples, T steps, H hidden features, G = gates * H. ``gates`` ``[B, T, G]`` are products
of the inputs, and are overwritten by the gates' values; ``order`` are the time steps from first to
last, which is backwards in the reverse direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """What acts on the states.

    hh: ``[G, P]``, P = H unless projected. bias: ``[G]`` or None; None, too, where it went into the
    products of the inputs. hr: ``[P, H]``, the projection of an LSTM's output, or None.
    """

    hh: Tensor
    bias: Tensor | None = None
    hr: Tensor | None = None


@dataclass(frozen=True)
class Errors:
    """What a backward pass found.

    inputs, states: ``[B, T, G]``, errors of the products of inputs and of states: gradients of the
        loss by them. hidden, outputs: the projection's inputs ``[B, T, H]`` and errors
        ``[B, T, P]``, if there is one. h, c: ``[B, P]`` and ``[B, H]``, of the initial states.
    """

    inputs: Tensor
    states: Tensor
    h: Tensor
    c: Tensor | None = None
    hidden: Tensor | None = None
    outputs: Tensor | None = None


def shifted(x: Tensor, first: Tensor, order: Sequence[int]) -> Tensor:
    """Return what was there before each step ``[B, T, n]``: ``first``, then x but for the last."""
    first = first.unsqueeze(1)
    if order[0] == 0:
        return torch.cat([first, x[:, :-1]], 1)
    return torch.cat([x[:, 1:], first], 1)


class Elman:
    """``h' = act(W_ih x + b_ih + W_hh h + b_hh)`` of ``nn.RNN``."""

    gates = 1
    has_cell = False
    joint_bias = True

    def __init__(self, relu: bool) -> None:
        self._relu = relu

    def forward(
        self, gates: Tensor, h: Tensor, c: Tensor | None, weights: Weights, order: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the states after each step ``[B, T, H]``, and nothing more to keep."""
        steps, transposed = gates.unbind(1), weights.hh.t()
        for t in order:
            h = steps[t].addmm_(h, transposed)
            h = h.relu_() if self._relu else h.tanh_()
        return gates, ()

    def backward(
        self,
        d_outputs: Tensor,
        d_cell: Tensor | None,
        outputs: Tensor,
        h: Tensor,
        c: Tensor | None,
        saved: tuple[Tensor, ...],
        weights: Weights,
        order: Sequence[int],
    ) -> Errors:
        """Return the errors."""
        slopes = (outputs > 0).to(outputs.dtype) if self._relu else 1 - outputs.square()
        errors = torch.empty_like(outputs)
        each = [x.unbind(1) for x in (d_outputs, slopes, errors)]
        carried = torch.zeros_like(h)
        for t in reversed(order):
            d_output, slope, error = (x[t] for x in each)
            torch.mul(d_output + carried, slope, out=error)
            carried = error @ weights.hh
        return Errors(errors, errors, carried)


class Gru:
    """``h' = n + z (h - n)``, ``n = tanh(W_in x + b_in + r (W_hn h + b_hn))``, gates r and z."""

    gates = 3
    has_cell = False
    joint_bias = False

    def forward(
        self, gates: Tensor, h: Tensor, c: Tensor | None, weights: Weights, order: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the states after each step ``[B, T, H]``; keep r, z, n and ``W_hn h + b_hn``."""
        size = h.shape[1]
        outputs, products = gates.new_empty(*gates.shape[:2], size), torch.empty_like(gates)
        r, z, n = (x.unbind(1) for x in gates.chunk(3, -1))
        r_z, of_r_z = (x[..., : 2 * size].unbind(1) for x in (gates, products))
        of_n = products[..., 2 * size :].unbind(1)
        steps, after, transposed = products.unbind(1), outputs.unbind(1), weights.hh.t()
        bias = weights.hh.new_zeros(3 * size) if weights.bias is None else weights.bias
        for t in order:
            torch.addmm(bias, h, transposed, out=steps[t])
            r_z[t].add_(of_r_z[t]).sigmoid_()
            n[t].addcmul_(r[t], of_n[t]).tanh_()
            h = torch.lerp(n[t], h, z[t], out=after[t])
        return outputs, (gates, products[..., 2 * size :].contiguous())

    def backward(
        self,
        d_outputs: Tensor,
        d_cell: Tensor | None,
        outputs: Tensor,
        h: Tensor,
        c: Tensor | None,
        saved: tuple[Tensor, ...],
        weights: Weights,
        order: Sequence[int],
    ) -> Errors:
        """Return the errors; that of n is r times as much in the product of the states."""
        gates, of_n = saved
        r, z, n = gates.chunk(3, -1)
        n_slopes = (1 - z) * (1 - n.square())
        slopes = torch.stack(
            [
                n_slopes * of_n * r * (1 - r),
                (shifted(outputs, h, order) - n) * z * (1 - z),
                n_slopes * r,
            ],
            2,
        )
        totals, errors = torch.empty_like(outputs), torch.empty_like(slopes)
        flat = errors.flatten(2)
        each = [x.unbind(1) for x in (d_outputs, totals, slopes, errors, flat, z)]
        carried = torch.zeros_like(h)
        for t in reversed(order):
            d_output, total, slope, error, row, keep = (x[t] for x in each)
            torch.add(d_output, carried, out=total)
            torch.mul(total.unsqueeze(1), slope, out=error)
            carried = torch.addmm(total * keep, row, weights.hh)
        inputs = torch.cat([flat[..., : -n.shape[-1]], totals * n_slopes], -1)
        return Errors(inputs, flat, carried)


class Lstm:
    """``c' = f c + i g``, ``h' = o tanh(c')``, and ``W_hr`` times that if projected."""

    gates = 4
    has_cell = True
    joint_bias = True

    def forward(
        self, gates: Tensor, h: Tensor, c: Tensor | None, weights: Weights, order: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the states after each step ``[B, T, P]``; keep i, f, g, o and all c."""
        assert c is not None
        size = c.shape[1]
        cells = gates.new_empty(*gates.shape[:2], size)
        outputs = gates.new_empty(*gates.shape[:2], h.shape[1])
        i_f, (i, f, g, o) = (
            gates[..., : 2 * size].unbind(1),
            (x.unbind(1) for x in gates.chunk(4, -1)),
        )
        steps, cell, after = gates.unbind(1), cells.unbind(1), outputs.unbind(1)
        transposed = weights.hh.t()
        for t in order:
            steps[t].addmm_(h, transposed)
            i_f[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            c = torch.mul(f[t], c, out=cell[t]).addcmul_(i[t], g[t])
            if weights.hr is None:
                h = torch.mul(o[t], c.tanh(), out=after[t])
            else:
                h = torch.mm(o[t] * c.tanh(), weights.hr.t(), out=after[t])
        return outputs, (gates, cells)

    def backward(
        self,
        d_outputs: Tensor,
        d_cell: Tensor | None,
        outputs: Tensor,
        h: Tensor,
        c: Tensor | None,
        saved: tuple[Tensor, ...],
        weights: Weights,
        order: Sequence[int],
    ) -> Errors:
        """Return the errors."""
        assert c is not None and d_cell is not None
        gates, cells = saved
        i, f, g, o = gates.chunk(4, -1)
        squashed = cells.tanh()
        slopes = torch.stack(
            [g * i * (1 - i), shifted(cells, c, order) * f * (1 - f), i * (1 - g.square())], 2
        )
        o_slopes, c_slopes = squashed * o * (1 - o), o * (1 - squashed.square())
        errors, totals = torch.empty_like(gates), torch.empty_like(outputs)
        size = c.shape[1]
        of_ifg, of_o = errors[..., : 3 * size].unflatten(-1, (3, size)), errors[..., 3 * size :]
        each = [
            x.unbind(1)
            for x in (d_outputs, totals, slopes, o_slopes, c_slopes, f, of_ifg, of_o, errors)
        ]
        # Of the last cell, or of the cell at every step.
        each_cell = d_cell.unbind(1) if d_cell.dim() == 3 else None
        carried, carried_c = torch.zeros_like(h), d_cell
        if each_cell is not None:
            carried_c = torch.zeros_like(c)
        for t in reversed(order):
            if each_cell is not None:
                carried_c = carried_c + each_cell[t]
            d_output, total, slope, o_slope, c_slope, keep, ifg, last, row = (x[t] for x in each)
            torch.add(d_output, carried, out=total)
            d_hidden = total if weights.hr is None else total @ weights.hr
            d_c = torch.addcmul(carried_c, d_hidden, c_slope)
            torch.mul(d_c.unsqueeze(1), slope, out=ifg)
            torch.mul(d_hidden, o_slope, out=last)
            carried, carried_c = row @ weights.hh, d_c * keep
        if weights.hr is None:
            return Errors(errors, errors, carried, carried_c)
        return Errors(errors, errors, carried, carried_c, o * squashed, totals)


Cell = Elman | Gru | Lstm
