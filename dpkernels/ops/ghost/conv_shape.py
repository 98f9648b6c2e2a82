"""The geometry of a convolution, and which formula is the cheapest for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpkernels.ops.factor import Factor, Full, LowRank
from dpkernels.ops.ghost.plan import Plan, factor_elements, factor_flops, sum_bytes

Size = int | Sequence[int]
FORMULAS = ("rank_one", "gram", "materialised")

# Products of pixels that the Gram formula keeps in a thread's second-level cache while it adds
# them up: half of 512 KiB, beside the pixels themselves.
_GRAM_BYTES = 256 << 10
# What one of those additions costs in flops of a product: a load from an address that is looked up.
# Measured on 196 positions, 9 taps, 16 -> 32 channels, one core: 231 us a sample, 25 of them in
# products; that is 0.6 ns for each of positions^2 * taps, against 0.018 ns a flop.
_FLOPS_PER_LOOKUP = 33


@dataclass(frozen=True)
class ConvShape:
    """Sizes of a convolution: input ``[B, C, *input]``, output ``[B, O, *output]``."""

    batch: int
    channels: int
    out_channels: int
    groups: int
    input: tuple[int, ...]
    output: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> int:
        """L, the number of output positions."""
        return math.prod(self.output)

    @property
    def taps(self) -> int:
        """K, the number of kernel elements for each input channel."""
        return math.prod(self.kernel_size)

    @property
    def columns(self) -> int:
        """I, the elements of a patch of one group: ``C / groups * K``."""
        return self.channels // self.groups * self.taps

    @property
    def meetings(self) -> int:
        """How many patches a pixel is in at most: a tap meets it once, if the stride allows."""
        total = 1
        axes = zip(self.output, self.kernel_size, self.stride, self.dilation, strict=True)
        for out, kernel, step, distance in axes:
            phases = [tap * distance % step for tap in range(kernel)]
            total *= min(out, max(phases.count(phase) for phase in phases))
        return total

    @property
    def weight(self) -> tuple[int, ...]:
        """The weight's shape."""
        return (self.out_channels, self.channels // self.groups, *self.kernel_size)

    def geometry(
        self,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Return kernel size, stride, padding, dilation and groups, as the operators take them."""
        return self.kernel_size, self.stride, self.padding, self.dilation, self.groups


def _per_axis(op: str, name: str, value: Size, rank: int, least: int) -> tuple[int, ...]:
    if isinstance(value, str):
        raise ValueError(
            f"{op}: {name} must be a number for each axis, the same on both sides, got {value!r}; "
            "pad the activations first"
        )
    numbers = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(numbers) != rank or any(number < least for number in numbers):
        raise ValueError(
            f"{op}: {name} must be one number >= {least} or {rank} of them, got {value}"
        )
    return numbers


def conv_shape(
    op: str,
    activations: Sequence[int],
    errors: Sequence[int],
    kernel_size: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
) -> ConvShape:
    """Return the geometry of a convolution; raise ValueError if the shapes do not belong to it."""
    rank = len(activations) - 2
    if rank not in (1, 2, 3) or len(errors) != rank + 2 or activations[0] != errors[0]:
        raise ValueError(
            f"{op}: activations must be [B, C, ...] and errors [B, O, ...] with 1 to 3 spatial "
            f"axes, got {list(activations)} and {list(errors)}; add the batch axis if it is missing"
        )
    kernel = _per_axis(op, "kernel_size", kernel_size, rank, 1)
    steps = _per_axis(op, "stride", stride, rank, 1)
    pads = _per_axis(op, "padding", padding, rank, 0)
    dilations = _per_axis(op, "dilation", dilation, rank, 1)
    if groups < 1 or activations[1] % groups or errors[1] % groups:
        raise ValueError(
            f"{op}: groups must divide the {activations[1]} input and {errors[1]} output channels, "
            f"got {groups}"
        )
    axes = zip(activations[2:], kernel, steps, pads, dilations, strict=True)
    output = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)
    if output != tuple(errors[2:]) or min(output) < 1:
        raise ValueError(
            f"{op}: errors must be [{errors[0]}, {errors[1]}, {', '.join(map(str, output))}] for "
            f"this convolution of {list(activations)}, got {list(errors)}"
        )
    return ConvShape(
        batch=activations[0],
        channels=activations[1],
        out_channels=errors[1],
        groups=groups,
        input=tuple(activations[2:]),
        output=output,
        kernel_size=kernel,
        stride=steps,
        padding=pads,
        dilation=dilations,
    )


def gradients_kept(shape: ConvShape) -> bool:
    """Return whether per-sample gradients are small enough to keep from norms to sum.

    Small is what capturing the layer holds already: no larger than activations and errors. The
    weighted sum then reads them once instead of computing them again.
    """
    gradients = shape.out_channels * shape.columns
    captured = shape.channels * math.prod(shape.input) + shape.out_channels * shape.positions
    return gradients <= captured


def transforms_gradients(shape: ConvShape, left: Factor | None) -> bool:
    """Return whether ``left`` costs less on kept gradients, I columns, than on L positions."""
    return left is not None and gradients_kept(shape) and shape.columns < shape.positions


def why_not(shape: ConvShape, formula: str, right: Factor | None) -> str | None:
    """Return the reason why ``formula`` does not apply, or None if it does."""
    if formula == "rank_one" and shape.positions != 1:
        return f"it needs one output position, there are {shape.positions}"
    if formula == "gram" and right is not None:
        return (
            "products of patches under a right factor are no sums of products of pixels; "
            "'materialised' takes right factors"
        )
    return None


def sample_costs(shape: ConvShape, left: Factor | None, right: Factor | None) -> dict[str, int]:
    """Return the flops of norms and sum for one sample, by every formula that applies."""
    positions, o, pixels = shape.positions, shape.out_channels, math.prod(shape.input)
    product = 2 * positions * o * shape.columns
    on_errors = positions * factor_flops(left)
    on_left = shape.columns * factor_flops(left) if transforms_gradients(shape, left) else on_errors
    second = 2 * o * shape.columns if gradients_kept(shape) else product
    costs = {"materialised": product + second + on_left + o * factor_flops(right)}
    if why_not(shape, "gram", right) is None:
        lookups = _FLOPS_PER_LOOKUP * shape.groups * shape.taps
        products = pixels**2 * shape.channels + positions**2 * (o + lookups)
        costs["gram"] = products + product + on_errors
    if why_not(shape, "rank_one", right) is None:
        vectors = 2 * (shape.groups * shape.columns + o)
        costs["rank_one"] = product + vectors + on_errors + shape.groups * factor_flops(right)
    return costs


def cheapest(shape: ConvShape, left: Factor | None, right: Factor | None) -> str:
    """Return the formula with the fewest flops whose scratch memory stays in the cache.

    Written as a loop over one sample's costs: it is traced by ``torch.compile``, where the batch
    size may be a symbol.
    """
    costs = sample_costs(shape, left, right)
    formula = "materialised"
    for name, cost in costs.items():
        fits = name != "gram" or (math.prod(shape.input) + 1) ** 2 * 8 <= _GRAM_BYTES
        if fits and cost < costs[formula]:
            formula = name
    return formula


def plan_of(
    shape: ConvShape, left: Factor | None, right: Factor | None, bias: bool, element_bytes: int
) -> Plan:
    """Return the cheapest formula and what it costs."""
    costs = {name: shape.batch * c for name, c in sample_costs(shape, left, right).items()}
    formula = cheapest(shape, left, right)
    again = "small enough to keep" if gradients_kept(shape) else "computed again for the sum"
    reasons = {
        "rank_one": "one output position: the norm is a product of two vector norms",
        "gram": f"{math.prod(shape.input)} pixels: their products are fewer than the gradient's "
        "elements",
        "materialised": f"{shape.positions} positions: the gradient itself costs least, and is "
        + again,
    }
    return Plan(
        formula=formula,
        flops=costs[formula],
        bytes=_traffic(shape, left, right, formula, element_bytes),
        kept_bytes=_kept(shape, left, right, formula, bias, element_bytes),
        reason=reasons[formula],
        alternatives=costs,
    )


def _traffic(
    shape: ConvShape, left: Factor | None, right: Factor | None, formula: str, element_bytes: int
) -> int:
    wide = sum_bytes(element_bytes)
    gradient = shape.out_channels * shape.columns
    inputs = shape.channels * math.prod(shape.input)
    errors = shape.out_channels * shape.positions
    sample = (inputs + errors) * element_bytes
    # The errors are written if transformed, and then read as such.
    late = formula == "materialised" and transforms_gradients(shape, left)
    sample += 2 * errors * wide * (left is not None and not late)
    if formula == "rank_one":
        patches = shape.groups * shape.columns
        sample += wide * (patches + 2 * patches * (right is not None) + patches + errors)
    elif formula == "materialised" and gradients_kept(shape):
        sample += 2 * gradient * wide
    else:
        sample += inputs * element_bytes + errors * (element_bytes if left is None else wide)
    factors = factor_elements(left) + factor_elements(right)
    return shape.batch * sample + wide * (factors + gradient)


def _kept(
    shape: ConvShape,
    left: Factor | None,
    right: Factor | None,
    formula: str,
    bias: bool,
    element_bytes: int,
) -> int:
    wide = sum_bytes(element_bytes)
    errors = shape.out_channels * shape.positions
    if formula == "materialised" and gradients_kept(shape):
        whole = transforms_gradients(shape, left) or isinstance(right, Full | LowRank)
        gradient = shape.out_channels * (shape.columns + int(bias or whole))
        return shape.batch * gradient * wide
    kept = 0 if left is None else errors
    if left is not None and element_bytes < wide:
        kept += shape.channels * math.prod(shape.input)
    if formula == "rank_one":
        size = shape.columns if right is None else right.size
        copied = left is None and element_bytes < wide
        kept += shape.groups * size + (errors if copied else 0)
    return shape.batch * kept * wide
