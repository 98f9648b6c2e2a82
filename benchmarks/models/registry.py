"""All cases, in the order of the table."""

from __future__ import annotations

from benchmarks.models.adapters import ADAPTERS
from benchmarks.models.case import Case
from benchmarks.models.language import BOTH, DECODERS, ENCODERS
from benchmarks.models.speech import SPEECH, TOGETHER
from benchmarks.models.vision import IMAGES


def all_cases() -> list[Case]:
    """Return every model of the table."""
    return [*ENCODERS, *DECODERS, *BOTH, *IMAGES, *SPEECH, *TOGETHER, *ADAPTERS]
