"""The dtype in which weights are sent to the engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from agentrl.config.load import load_config
from agentrl.train.engine_weights import sent_dtype


@dataclass(frozen=True)
class FakeEngine:
    """Reports a dtype."""

    held: str | None

    async def dtype(self) -> str | None:
        return self.held


@dataclass(frozen=True)
class FakeFleet:
    live: tuple[FakeEngine, ...]


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
    fleet = FakeFleet(tuple(map(FakeEngine, held)))
    assert asyncio.run(sent_dtype(config.weights, fleet)) == sent  # type: ignore[arg-type]
