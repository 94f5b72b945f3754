"""The tool servers of a run: started or attached to, and their clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.config.tools import ToolConfig
from agentrl.core.task import TaskSet
from agentrl.core.tool import Tool, ToolClient
from agentrl.obs.waiting import waiting
from agentrl.runtime.run_tools import run_services, served_tools, service_options, tool_url, warn_unsandboxed
from agentrl.toolserver.launch import ToolServerProcess, launch_tool


class ToolServers:
    """Servers and clients of all tools that the environment or the multi-turn loop needs.

    Args:
        config: of the run.
        tasks: passed to the servers that are started.
        folder: of the run; servers write to ``tools/``.
        logs: folder of their logs.

    Raises:
        UserError: a tool does not exist, or its options do not fit.

    """

    def __init__(self, config: Config, tasks: TaskSet, folder: Path, logs: Path) -> None:
        self._config, self._tasks, self._folder, self._logs = config, tasks, folder, logs
        self._services = run_services(config)
        self._processes: list[ToolServerProcess] = []
        self.offered: Mapping[str, Tool] = served_tools(config, self._services)
        """What a policy may call at the servers, by the tool's name."""
        self.clients: dict[str, ToolClient] = {}
        """By the tool's registered name."""

    async def start(self) -> None:
        """Start all servers without an address concurrently, and wait until they answer.

        Raises:
            ToolServerError: a server does not start; the message has its last log lines.

        """
        warn_unsandboxed(self._config, self._services)
        starts = [asyncio.to_thread(self._start, name) for name in self._services]
        results = await asyncio.gather(*starts, return_exceptions=True)
        self._processes = [started for started in results if isinstance(started, ToolServerProcess)]
        for (name, service), started in zip(self._services.items(), results, strict=True):
            if isinstance(started, BaseException):
                raise started
            url = tool_url(self._config, name) if started is None else started.url
            assert url is not None
            self.clients[name] = service.client(url, service_options(self._config, name, service))

    def _start(self, name: str) -> ToolServerProcess | None:
        """Return a started server, or None if the configuration has the address of a running one."""
        if tool_url(self._config, name) is not None:
            return None
        tool, service = self._config.tools.get(name, ToolConfig()), self._services[name]
        file_name = re.sub(r"[^\w.-]+", "_", name)  # the name may be path/to/file.py:name
        options = service_options(self._config, name, service)
        arguments = service.launch_arguments(options, self._tasks, self._folder / "tools" / file_name)
        log = self._logs / f"{file_name}.log"
        with waiting("start", f"of the tool server {name}"):
            return launch_tool(name, arguments, log=log, port=tool.port, timeout_s=tool.start_timeout_s)

    async def aclose(self) -> None:
        """Close the clients and stop the servers that were started."""
        for client in self.clients.values():
            await client.aclose()
        for process in self._processes:
            process.stop()

    def check(self) -> None:
        """Raise `ToolServerError` if a started server has died, with its last log lines."""
        for process in self._processes:
            process.check()
