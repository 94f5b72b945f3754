from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.learner.learners import Learners, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def learners(model: Path) -> Iterator[Learners]:
    opened = Learners(model)
    yield opened
    opened.close()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Return a list that gets, for each graph that is compiled, whether it has gradients."""
    compiled: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        compiled.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()
