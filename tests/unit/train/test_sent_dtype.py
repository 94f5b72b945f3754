"""The dtype in which weights are sent to the engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from agentrl.config.load import load_config
from agentrl.testing import FakeEngine
from agentrl.train.engine_weights import sent_dtype


@pytest.mark.parametrize(
    ("key", "held", "sent"),
    [
        ("auto", ["bfloat16", "bfloat16"], "bfloat16"),
        ("auto", ["float32"], "float32"),
        ("auto", ["bfloat16", "float32"], None),
        ("auto", ["bfloat16", None], None),
        ("float32", ["bfloat16"], "float32"),
    ],
)
def test_weights_are_sent_as_the_engines_hold_them(key: str, held: list[str | None], sent: str | None) -> None:
    config = load_config(None, [f"weights.dtype={key}"])
    fleet = SimpleNamespace(live=[FakeEngine(dtype=dtype) for dtype in held])
    assert asyncio.run(sent_dtype(config.weights, fleet)) == sent  # type: ignore[arg-type]
