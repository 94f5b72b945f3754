"""Container images that tasks name: which are allowed, and a sandbox backend for each, checked by the canary."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from fnmatch import fnmatchcase

from agentrl.core.errors import AgentrlError, SandboxFailure
from agentrl.sandbox.base import SandboxBackend
from agentrl.sandbox.canary.check import check_backend
from agentrl.toolserver.server.errors import ImageRefused


class TaskImages:
    """The sandbox backends of a server: that of ``sandbox.image``, and one for each other image that a task names.

    Args:
        default: the backend of ``sandbox.image``, started; closed by its owner.
    """

    def __init__(self, default: SandboxBackend) -> None:
        self._default = default
        self._started: dict[str, asyncio.Task[SandboxBackend]] = {}

    def check_allowed(self, image: str) -> None:
        """Check that sandboxes may be opened from an image.

        Raises:
            ImageRefused: they may not; the message names the key to set.
        """
        config = self._default.config
        if not self._default.has_images:
            raise ImageRefused(
                f"the task's metadata['sandbox_image']={image}, but sandbox.backend={self._default.name} has no images; set "
                f"sandbox.backend=docker and sandbox.images=[{image}]"
            )
        if image != config.image and not any(fnmatchcase(image, pattern) for pattern in config.images):
            raise ImageRefused(
                f"the task's metadata['sandbox_image']={image} is not allowed: add it to sandbox.images, which has: "
                f"{', '.join(config.images) or 'none'}"
            )

    async def backend(self, image: str | None) -> SandboxBackend:
        """Return the backend that opens sandboxes from an image; None: from ``sandbox.image``.

        The first use of an image starts its backend and waits for the canary. If that fails, the next use tries again.

        Raises:
            SandboxFailure: the image is missing, no sandbox runs on it, or the canary fails in it.
        """
        if image is None or image == self._default.config.image:
            return self._default
        if image not in self._started:
            self._started[image] = asyncio.create_task(self._start(image), name=f"start-image-{image}")
        try:
            return await asyncio.shield(self._started[image])  # other sessions wait for it too
        except AgentrlError as error:
            raise SandboxFailure(f"image {image} (the task's metadata['sandbox_image']): {error}") from error

    async def _start(self, image: str) -> SandboxBackend:
        try:
            async with AsyncExitStack() as exits:
                config = self._default.config.model_copy(update={"image": image})
                backend = await exits.enter_async_context(type(self._default)(config))
                await check_backend(backend)
                exits.pop_all()
                return backend
        except BaseException:
            del self._started[image]
            raise

    async def close(self) -> None:
        """Close the backends that were started here."""
        starting = list(self._started.values())
        for task in starting:
            task.cancel()
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, SandboxBackend):
                await result.close()
