"""Which examples property tests draw.

``ci``    the same ones in every run: what fails for one fails for all. ``make test`` uses it.
``long``  new ones in every run, and more of them; a failure prints how to repeat it.
          ``make test-long`` (``pytest --hypothesis-profile=long``) uses it.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

CI_EXAMPLES = 25
LONG_FACTOR = 10


def register() -> None:
    """Register both profiles and load ``ci``; pytest's option, read later, wins."""
    # Fixtures set a backend or a thread count, which is the same for every example.
    settings.register_profile(
        "ci",
        deadline=None,
        derandomize=True,
        max_examples=CI_EXAMPLES,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.register_profile(
        "long",
        settings.get_profile("ci"),
        derandomize=False,
        max_examples=CI_EXAMPLES * LONG_FACTOR,
        print_blob=True,
    )
    settings.load_profile("ci")


def examples(count: int) -> settings:
    """Return what draws ``count`` examples in the profile ``ci`` and as many times more in others.

    For tests whose single example is much cheaper or dearer than usual.
    """
    return settings(max_examples=count * settings().max_examples // CI_EXAMPLES)
