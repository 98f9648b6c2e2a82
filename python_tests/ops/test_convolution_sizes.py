"""Numbers of a convolution from which sizes overflow are refused before memory is touched.

Straight to the operators: the Python functions compute sizes in Python's integers.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from dpkernels import backend

if backend.extension is None:
    pytest.skip("dpkernels._C is not built", allow_module_level=True)

LISTS = ("kernel", "stride", "padding", "dilation")
PLAIN = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
# From these, products and sums wrap to sizes that look right: 4 * 2^62 is 0, 2 * 2^62 negative.
HUGE = (2**31, 2**32, 2**61, 2**62, 2**63 - 1)
FORMULAS = ("gram", "materialised")


def moment(shape, numbers, groups=1):
    lists = [numbers[name] for name in LISTS]
    return torch.ops.dpkernels.conv_second_moment.default(
        torch.ones(shape), *lists, groups, True, 1.0
    )


def norms(shape, numbers, groups=1, formula="materialised"):
    lists = [numbers[name] for name in LISTS]
    x = torch.ones(shape)
    return torch.ops.dpkernels.ghost_conv_norms.default(
        x, x.clone(), *lists, groups, True, None, formula, False
    )


def calls(shape, numbers, groups=1):
    """Return the calls that take these numbers."""
    yield lambda: moment(shape, numbers, groups)
    for formula in FORMULAS:
        yield lambda formula=formula: norms(shape, numbers, groups, formula)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("name", "value"), itertools.product(LISTS, HUGE))
def test_one_huge_number_is_refused(axes, name, value):
    # A kernel of 5 makes dilation count: 2^62 times 4 is 0 in 64 bits.
    numbers = {n: [PLAIN[n] if n != "kernel" else 5] * axes for n in LISTS}
    numbers[name] = [*numbers[name][:-1], value]
    for call in calls((1, 1, *[8] * axes), numbers):
        with pytest.raises(ValueError, match=r"must be in \[[01], 2\^31\), got"):
            call()


@pytest.mark.parametrize("axes", [2, 3])
def test_a_product_of_axes_that_overflows_is_refused(axes):
    # Each padded axis has 2^32 elements, so that two of them have 2^64, which is 0.
    numbers = {n: [PLAIN[n]] * axes for n in LISTS} | {"padding": [2**31 - 1] * axes}
    numbers["stride"] = [2**31 - 1] * axes
    with pytest.raises(ValueError, match=r"more than 2\^40 elements"):
        moment((1, 1, *[2] * axes), numbers)
    # Three positions of an axis: at 0, 2^31 - 1 and 2^32 - 2.
    x, d = torch.ones(1, 1, *[2] * axes), torch.ones(1, 1, *[3] * axes)
    lists = [numbers[name] for name in LISTS]
    for formula in FORMULAS:
        with pytest.raises(ValueError, match=r"more than 2\^40 elements"):
            torch.ops.dpkernels.ghost_conv_norms.default(
                x, d, *lists, 1, True, None, formula, False
            )


@pytest.mark.parametrize("axes", [2, 3])
def test_a_kernel_that_overflows_is_refused(axes):
    # 2^22 taps on each of three axes are 2^66, and 2^32 on each of two cannot be asked for.
    numbers = {n: [PLAIN[n]] * axes for n in LISTS}
    numbers |= {"kernel": [2**22] * axes, "padding": [2**21] * axes}
    for call in calls((1, 1, *[1] * axes), numbers):
        with pytest.raises(
            ValueError, match=r"more than 2\^40 elements|size that this convolution"
        ):
            call()


@pytest.mark.parametrize("groups", [2, 7, 2**40, 2**62])
def test_no_channels_have_no_groups(groups):
    numbers = {n: [PLAIN[n]] for n in LISTS}
    for call in calls((1, 0, 8), numbers, groups):
        with pytest.raises(ValueError, match="groups must divide the 0 channels"):
            call()


def test_empty_axes_and_channels_compute():
    numbers = {n: [PLAIN[n]] for n in LISTS}
    assert moment((1, 0, 8), numbers).shape == (1, 1, 1)
    assert moment((0, 2, 8), numbers).shape == (1, 3, 3)
    assert norms((0, 2, 8), numbers)[0].shape == (0,)
