"""The dtype in which weights are sent to the engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
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
        ("auto", ["float8_e4m3fn"] * 2, "float8_e4m3fn"),
        ("float8", ["float8_e4m3fn"], "float8_e4m3fn"),
    ],
)
def test_weights_are_sent_as_the_engines_hold_them(key: str, held: list[str | None], sent: str | None) -> None:
    config = load_config(None, [f"weights.dtype={key}"])
    fleet = SimpleNamespace(live=[FakeEngine(dtype=dtype) for dtype in held])
    assert asyncio.run(sent_dtype(config.weights, fleet)) == sent  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("auto", ["float8_e4m3fn", "bfloat16"]),
        ("float8", ["bfloat16"]),
        ("float8", [None]),
        ("bfloat16", ["float8_e4m3fn"]),
    ],
)
def test_float8_is_sent_only_to_engines_that_have_it(key: str, held: list[str | None]) -> None:
    config = load_config(None, [f"weights.dtype={key}", "sampler.backend=sglang"])
    fleet = SimpleNamespace(live=[FakeEngine(dtype=dtype) for dtype in held])
    with pytest.raises(ConfigError, match=rf"^weights\.dtype={key}, and the engines have weights of"):
        asyncio.run(sent_dtype(config.weights, fleet))  # type: ignore[arg-type]
