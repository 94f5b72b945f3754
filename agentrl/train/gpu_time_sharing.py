"""Learner and engines on the same GPUs, in turns: whoever does not work has given its memory back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agentrl.core.errors import EngineError
from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import Fleet
from agentrl.learner.base import LearnerGroup
from agentrl.obs.progress import Stopwatch


class Turns:
    """Hands the GPUs over. At the beginning engines and learner may both hold memory, or the learner may be asleep."""

    def __init__(self, fleet: Fleet) -> None:
        """Watch over the engines of ``fleet``, none of which may be started again while it is the learner's turn."""
        self._fleet = fleet
        self._learns = False
        """It is the learner's turn."""

    async def to_learner(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Let the learner work; ``watch`` gets the seconds as ``wake``. Nothing where it is its turn already.

        Raises:
            EngineError: an engine that lives keeps its memory.
            LearnerError: there is not enough memory for the learner, or a rank failed.

        """
        if self._learns:
            return
        with watch("wake"):
            await self.on_live(lambda engine: engine.release_memory())
            await self._fleet.ended()
            await asyncio.to_thread(learner.wake)
        self._learns = True

    async def to_engines(self, learner: LearnerGroup, send: Callable[[], Awaitable[None]], watch: Stopwatch) -> None:
        """Let the engines sample with the weights that ``send`` brings them, which both hold meanwhile.

        ``watch`` gets the seconds of sending as ``sync`` and all others as ``sleep``.

        Raises:
            EngineError: an engine that lives does not take its memory or the weights.
            LearnerError: a rank failed.

        """
        await self.to_learner(learner, watch)
        with watch("sleep"):
            await self.on_live(lambda engine: engine.take_back_memory("weights"))
        with watch("sync"):
            await send()
        with watch("sleep"):
            await asyncio.to_thread(learner.sleep)
            await self.on_live(lambda engine: engine.take_back_memory("kv_cache"))
        self._learns = False

    async def on_live(self, call: Callable[[EngineControl], Awaitable[None]]) -> None:
        """Make a call to every engine that lives, at the same time. One that turns out to be lost may fail it.

        Raises:
            EngineError: of an engine that lives.

        """
        engines = self._fleet.live
        results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
        errors = {engine: result for engine, result in zip(engines, results, strict=True) if result is not None}
        if errors:
            await self._fleet.look()
        for engine, error in errors.items():
            if not isinstance(error, EngineError) or engine in self._fleet.live:
                raise error
