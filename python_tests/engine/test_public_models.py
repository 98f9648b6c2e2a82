"""Models of Hugging Face and PEFT: gradients of single samples, or a refusal that is known."""

from __future__ import annotations

import pytest

from python_tests.optional_packages import optional_package

transformers = optional_package("transformers")
optional_package("peft")

from benchmarks.models.check import check  # noqa: E402
from benchmarks.models.registry import all_cases  # noqa: E402


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore")
def test_a_model_is_trained_as_single_samples_are_or_refused(case):
    transformers.logging.set_verbosity_error()
    result = check(case, batches=(3,))
    assert result.expected, result.message or f"off by {result.error:.1e} ({result.rules})"
