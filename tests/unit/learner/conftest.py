from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.learner.learners import Learners, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def learners(model: Path) -> Iterator[Learners]:
    opened = Learners(model)
    yield opened
    opened.close()
