"""Hung engines: how long one may be silent, by what it is doing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.load import load_config
from agentrl.inference.fleet.health import Engine, HealthMonitor
from agentrl.inference.fleet.router import RoutedSampler


class Silent:
    """Client of an engine that receives weights and does not answer until it has them."""

    url = "http://127.0.0.1:1"

    def __init__(self, update_s: float | None) -> None:
        self.updates = SimpleNamespace(in_progress=update_s is not None)
        self._update_s = update_s

    async def healthy(self) -> bool:
        if self._update_s is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self._update_s or 0)
        self.updates.in_progress = False
        self._update_s = 0.0
        return True


@pytest.mark.parametrize(
    ("update_s", "key"), [(None, "stall_timeout_s=0.2"), (0.6, None), (60.0, "update_timeout_s=1")]
)
def test_an_engine_may_be_silent_for_longer_while_it_receives_weights(update_s: float | None, key: str | None) -> None:
    settings = ["sampler.stall_timeout_s=0.2", "sampler.update_timeout_s=1", "sampler.health_interval_s=0.05"]
    client: Any = Silent(update_s)
    engine = Engine("engine-0", client, None)

    async def relaunch(engine: Engine) -> None:
        raise AssertionError("nothing restarts an attached engine")

    async def hung() -> str:
        monitor = HealthMonitor([engine], RoutedSampler(), load_config(None, settings).sampler, relaunch)  # type: ignore[arg-type]
        async with asyncio.timeout(1.5):
            return await monitor._until_hung(engine)

    if key is None:
        with pytest.raises(TimeoutError):
            asyncio.run(hung())
    else:
        assert f"for sampler.{key} s" in asyncio.run(hung())
