"""The memory of an engine that shares its GPU with the learner: given back, and taken again."""

from __future__ import annotations

import asyncio

from agentrl.inference.base import MemoryPart
from agentrl.inference.client.weight_updates import Control, RefusedControl, WeightUpdates

_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")


class EngineMemory:
    """What of its memory an engine has given back. SGLang ends where it is told the same twice, so this remembers."""

    def __init__(self, control: Control, updates: WeightUpdates) -> None:
        """Steer the engine behind ``control``, which holds all of its memory."""
        self._control = control
        self._updates = updates
        self._out: set[MemoryPart] = set()
        """What it has given back, or may have."""
        self._back: asyncio.Event | None = None
        """Cleared while anything is out; None: never was."""

    @property
    def out(self) -> bool:
        """Whether the engine lacks a part of its memory."""
        return bool(self._out)

    async def opened(self) -> None:
        """Wait until the engine has all of its memory."""
        if self._back is not None:
            await self._back.wait()

    async def release(self) -> None:
        """Have the engine give back what it still holds, once nothing runs on it.

        Raises:
            EngineError: it is paused, gets weights, stays busy for minutes, or refuses.
        """
        missing = [part for part in _PARTS if part not in self._out]
        if not missing:
            return
        before = set(self._out)
        self._out |= set(missing)
        self._back = self._back or asyncio.Event()
        self._back.clear()
        untouched = True
        try:
            await self._updates.idle()
            untouched = False
            await self._control.call("/release_memory_occupation", {"tags": missing}, once=True)
        except BaseException as error:
            if untouched or isinstance(error, RefusedControl):
                self._out = before
                self._finish()
            raise
        finally:
            if "weights" in self._out:
                self._updates.weights_left()

    async def take_back(self, part: MemoryPart) -> None:
        """Have the engine take a part again; nothing where it holds that."""
        if part not in self._out:
            return
        await self._control.call("/resume_memory_occupation", {"tags": [part]}, once=True)
        self._out.remove(part)
        if part == "weights":
            self._updates.weights_back()
        self._finish()

    def _finish(self) -> None:
        if not self._out and self._back is not None:
            self._back.set()
