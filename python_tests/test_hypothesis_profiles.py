"""``ci`` draws the same examples in every run, ``long`` new ones and more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_tests.hypothesis_profiles import CI_EXAMPLES, LONG_FACTOR, examples


def drawn(profile: settings) -> list[int]:
    """Return the examples that one run of a property test draws."""
    seen: list[int] = []

    @settings(profile, database=None)
    @given(st.integers(0, 2**62))
    def test(x: int) -> None:
        seen.append(x)

    test()
    return seen


def test_the_fixed_profile_repeats_its_examples():
    first, second = (drawn(settings.get_profile("ci")) for _ in range(2))
    assert first == second
    assert len(first) == CI_EXAMPLES


def test_the_long_profile_draws_new_examples_and_more():
    first, second = (drawn(settings.get_profile("long")) for _ in range(2))
    assert first != second
    assert len(first) == len(second) == CI_EXAMPLES * LONG_FACTOR


@pytest.mark.parametrize(("profile", "factor"), [("ci", 1), ("long", LONG_FACTOR)])
def test_a_count_of_its_own_grows_with_the_profile(profile, factor):
    before = settings.get_current_profile_name()
    settings.load_profile(profile)
    try:
        assert examples(2).max_examples == 2 * factor
        assert examples(2).derandomize == (profile == "ci")
        assert examples(2).deadline is None
    finally:
        settings.load_profile(before)
