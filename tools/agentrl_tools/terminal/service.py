"""The service as agentrl starts and calls it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentrl import Tool
from agentrl.config.base import Section
from agentrl.containers.machines import Machines
from agentrl.containers.task_machines import machine_spec
from agentrl.core.atomic_files import write_private
from agentrl.core.errors import MissingError
from agentrl.core.extras import require
from agentrl.core.task import TaskSet
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.service import HostedService

from .bash import BASH, BashTool
from .episodes import Episodes
from .left_machines import remove_left_machines
from .mcp_servers import McpLimits
from .options import TerminalOptions
from .terminal import TerminalTool

_OWNER = "owner"
_log = logging.getLogger(__name__)


class TerminalService(HostedService):
    """Machines of container tasks. They outlive the server: its next start, or a resumed run, continues with them."""

    name: ClassVar[str] = "terminal"
    Options: ClassVar[type[Section]] = TerminalOptions
    uses_containers: ClassVar[bool] = True
    resumable: ClassVar[bool] = True

    def create_tools(self, options: TerminalOptions) -> Sequence[HostedTool]:
        """Return the tool of environments and that of policies.

        Raises:
            MissingError: with images Pillow is not installed.
        """
        if options.mcp_images:
            require("PIL", "tools.terminal.options.mcp_images=true")
        limits = McpLimits(timeout_s=options.timeout_s, max_chars=options.max_chars, reads_images=options.mcp_images)
        episodes = Episodes(Machines(options.containers, options.owner), machine_spec, options.grading, limits)
        return [TerminalTool(episodes), BashTool(episodes, timeout_s=options.timeout_s, max_chars=options.max_chars)]

    def tools(self, options: Mapping[str, Any]) -> tuple[Tool, ...]:
        """Return ``bash`` alone: a policy neither opens machines nor grades."""
        return tuple(tool for tool in super().tools(options) if tool.name == BASH)

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the options, and that the Docker daemons answer; log a warning if agents could forge all rewards."""
        parsed = self._read(options).tool
        assert isinstance(parsed, TerminalOptions)
        if parsed.grading == "shared":
            _log.warning(
                "tools.terminal.options.grading=shared: tests run where the agent works, which can forge its reward "
                "(docs/explanation/grading.md)"
            )

        async def connect() -> None:
            async with Machines(parsed.containers, parsed.owner):
                pass

        try:
            asyncio.run(connect())
        except MissingError as error:
            hosts = ",".join(parsed.containers.hosts) or "null"
            raise MissingError(f"containers.hosts={hosts}: {error}") from error

    def launch_arguments(self, options: Mapping[str, Any], tasks: TaskSet, folder: Path) -> Sequence[str]:
        """Write the server's configuration; its machines belong to an owner that the folder names, also in a resumed run."""
        file = folder / _OWNER
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_private(file, secrets.token_hex(8))
        parsed = self._read(options)
        assert isinstance(parsed.tool, TerminalOptions)
        return self._write_config(
            replace(parsed, tool=parsed.tool.model_copy(update={"owner": file.read_text()})), folder
        )

    def remove_left(
        self, options: Mapping[str, object], folder: Path, find_resumed: Callable[[Collection[str]], Collection[str]]
    ) -> int:
        """Remove the machines of the folder's owner whose episodes do not continue."""
        parsed = self._read(options).tool
        assert isinstance(parsed, TerminalOptions)
        owned = parsed.model_copy(update={"owner": (folder / _OWNER).read_text()})
        return asyncio.run(remove_left_machines(owned, find_resumed))
