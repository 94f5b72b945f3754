"""Memory of an engine that shares its GPU with the learner: released for training and resumed afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from agentrl.inference.base import MemoryTag
from agentrl.inference.client.control import ControlEndpoint, ControlRefused
from agentrl.inference.client.weight_updates import SGLangWeightUpdates

_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class SGLangMemory:
    """Memory of one engine; see `agentrl.inference.base.EngineMemory`.

    SGLang crashes if memory is released or resumed twice, so this keeps track of what is released.
    """

    def __init__(
        self, control: ControlEndpoint, updates: SGLangWeightUpdates, cut: Callable[[str], Awaitable[None]]
    ) -> None:
        """Control the engine behind ``control``, which holds all of its memory; ``cut`` aborts generations in progress."""
        self._cut = cut
        self._control = control
        self._updates = updates
        self._released: set[MemoryTag] = set()
        """Parts that are released, or may be."""
        self._resumed: asyncio.Event | None = None
        """Cleared while any memory is released; None: none was so far."""

    @property
    def ready(self) -> bool:
        """Whether the engine holds all of its memory."""
        return not self._released

    async def wait_ready(self) -> None:
        """Wait until the engine holds all of its memory."""
        if self._resumed is not None:
            await self._resumed.wait()

    async def release(self, cut: Literal["abort", "restart"] | None = None) -> None:
        """Release what the engine still holds, once it runs nothing; see `agentrl.inference.base.EngineMemory`.

        Raises:
            EngineError: it is paused or receives weights, stays busy for minutes, or refuses.
        """
        tags = [tag for tag in _TAGS if tag not in self._released]
        if not tags:
            return
        previously_released = set(self._released)
        self._released |= set(tags)
        self._resumed = self._resumed or asyncio.Event()
        self._resumed.clear()
        sent = False
        try:
            await self._updates.publish()
            if cut is not None:
                await self._cut(cut)
            await self._updates.wait_idle()
            sent = True
            await self._control.call("/release_memory_occupation", {"tags": tags}, once=True)
        except BaseException as error:
            if not sent or isinstance(error, ControlRefused):
                self._released = previously_released
                self._set_if_resumed()
            raise
        finally:
            if "weights" in self._released:
                self._updates.set_released(True)
            await self._updates.publish()

    async def resume(self, tag: MemoryTag) -> None:
        """Allocate released memory again."""
        if tag not in self._released:
            return
        await self._control.call("/resume_memory_occupation", {"tags": [tag]}, once=True)
        self._released.remove(tag)
        if tag == "weights":
            self._updates.set_released(False)
        self._set_if_resumed()
        await self._updates.publish()

    def _set_if_resumed(self) -> None:
        if not self._released and self._resumed is not None:
            self._resumed.set()
