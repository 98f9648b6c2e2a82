"""``make sanitize`` knows every operator, and what it calls them with is what it says.

Without a sanitizer a read past an end rarely shows: that is what ``make sanitize`` is for. Here a
crash does, and an operator that refuses what it should take.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from python_tests.sanitize.__main__ import SANITIZERS, reports
from python_tests.sanitize.calls import CALLS
from python_tests.sanitize.draw import Draw
from python_tests.sanitize.malformed import malform
from python_tests.sanitize.worker import call, compiled_operators

SEEDS = st.integers(0, 2**32 - 1)
needs_extension = pytest.mark.skipif(not compiled_operators(), reason="dpkernels._C is not built")


@needs_extension
def test_every_compiled_operator_is_called():
    assert set(CALLS) == set(compiled_operators())


@needs_extension
@pytest.mark.parametrize("operator", CALLS)
@given(seed=SEEDS)
def test_well_formed_calls_compute(operator, seed):
    try:
        getattr(torch.ops.dpkernels, operator).default(*CALLS[operator](Draw(seed)))
    except ValueError as error:
        # What a tensor holds may be refused; how it was passed may not.
        if "not finite" not in str(error):
            raise


@needs_extension
@pytest.mark.parametrize("operator", CALLS)
@given(seed=SEEDS)
def test_malformed_calls_compute_or_raise(operator, seed):
    call(operator, seed, malformed=True)


def test_the_same_seed_makes_the_same_call():
    for operator in CALLS:
        first, second = (malform(draw, CALLS[operator](draw)) for draw in (Draw(7), Draw(7)))
        assert repr(first) == repr(second)


LOG = """call eigh seed 1 malformed False avx2 x1
csrc/a.h:3:4: runtime error: signed integer overflow
csrc/a.h:3:4: runtime error: signed integer overflow
call eigh seed 2 malformed True avx2 x1
csrc/a.h:3:4: runtime error: signed integer overflow
==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1
"""


def test_reports_are_named_once_with_their_first_call():
    found = reports(LOG, SANITIZERS["address"].report)
    assert list(found.values()) == [
        "eigh seed 1 malformed False avx2 x1",
        "eigh seed 2 malformed True avx2 x1",
    ]
    assert "a.h:3:4: runtime error" in next(iter(found))
    assert not reports(LOG, SANITIZERS["thread"].report)
