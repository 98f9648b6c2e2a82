"""A missing package does not turn tests off where they count."""

from __future__ import annotations

import sys

import pytest

from python_tests.optional_packages import optional_package


@pytest.fixture
def missing(monkeypatch) -> str:
    monkeypatch.setitem(sys.modules, "transformers", None)
    return "transformers"


def test_missing_package_fails_in_ci(monkeypatch, missing):
    monkeypatch.setenv("CI", "true")
    # A skip would otherwise skip this test, too.
    with pytest.raises((ModuleNotFoundError, pytest.skip.Exception)) as raised:
        optional_package(missing)
    assert raised.type is ModuleNotFoundError


def test_missing_package_skips_elsewhere(monkeypatch, missing):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=missing):
        optional_package(missing)


def test_package_that_is_there_is_imported(monkeypatch):
    for ci in ("true", ""):
        monkeypatch.setenv("CI", ci)
        assert optional_package("pytest") is pytest
