"""A bubblewrap backend for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentrl.core.errors import MissingError
from tests.unit.sandbox.bubblewraps import Bubblewrap


@pytest.fixture(scope="module")
def bubblewrap() -> Iterator[Bubblewrap]:
    try:
        made = Bubblewrap()
    except MissingError as error:
        pytest.skip(f"bubblewrap: {error}")
    yield made
    made.close()
