"""Marks of tests that need a package of an extra; it is imported when a test needs it, not when tests are collected."""

from importlib.util import find_spec

import pytest


def requires(package: str) -> pytest.MarkDecorator:
    """Skip tests where a package is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
