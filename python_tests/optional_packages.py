"""Packages that some tests need and an installation may lack."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def optional_package(name: str) -> ModuleType:
    """Import a package; without it, skip the module's tests, but fail in CI, where all are."""
    if os.environ.get("CI") == "true":
        return importlib.import_module(name)
    return pytest.importorskip(name)
