"""The tool servers of a run: started or attached to, and their clients."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.config.schema import Config
from agentrl.config.toolserver import ToolConfig
from agentrl.core.background import run_start
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import AgentrlError, ConfigError, ToolServerError
from agentrl.core.task import Task, TaskSet
from agentrl.core.tool import Tool, ToolClient
from agentrl.data.task_sources import TaskSources
from agentrl.obs.waiting import waiting
from agentrl.runtime.run_tools import run_services, served_tools, service_options, tool_url, warn_unsandboxed
from agentrl.toolserver.launch import ToolServerProcess, launch_tool

_log = logging.getLogger(__name__)


class JoinedCorpora(TaskSet):
    """The corpora of the tasksets of several sources, which share the server of a tool."""

    def __init__(self, tool: str, tasks: TaskSources) -> None:
        self._tool, self._tasks = tool, tasks

    def split(self, name: str) -> Sequence[Task]:
        """Return an empty sequence: a server gets no tasks."""
        return ()

    def corpora(self) -> Mapping[str, Iterable[Mapping[str, str]]]:
        """Return all corpora.

        Raises:
            ConfigError: two tasksets have a corpus of one name.
        """
        corpora: dict[str, Iterable[Mapping[str, str]]] = {}
        owners: dict[str, tuple[str, TaskSet]] = {}
        for source, tasks in self._tasks.items():
            for name, documents in tasks.corpora().items():
                owner_source, owner = owners.setdefault(name, (source, tasks))
                if owner is not tasks:
                    raise ConfigError(
                        f"sources.{owner_source} and sources.{source} share the server of the tool {self._tool!r}, and the "
                        f"tasksets of both have a corpus {name!r}: give them the same tasks.name and tasks.options, or set "
                        f"tools.{self._tool}.options.corpus"
                    )
                corpora.setdefault(name, documents)
        return corpora


@dataclass(slots=True)
class StartedServer:
    """A tool server that the run has started, and starts again on the same port when it dies."""

    name: str
    process: ToolServerProcess
    launch: Callable[[int], ToolServerProcess]
    """Starts it on a port, and blocks until it answers."""
    max_restarts: int
    """``tools.NAME.max_restarts``."""
    restarts: int = 0
    _starting: asyncio.Task[ToolServerProcess] | None = None

    def check(self) -> None:
        """Begin to start the server again if it has died. Meanwhile its clients wait, and retry. Called in the event loop.

        Raises:
            ToolServerError: it died once more than it may, or does not start again; with its last log lines.
            PortInUseError: something else listens on its port.
        """
        if self._starting is not None:
            if not self._starting.done():
                return
            self.process, self._starting = self._starting.result(), None
        try:
            self.process.check()
        except ToolServerError as error:
            if self.restarts == self.max_restarts:
                raise ToolServerError(f"tools.{self.name}.max_restarts={self.max_restarts}: {error}") from None
            self.restarts += 1
            why = str(error).partition("\n")[0].rstrip(":")
            _log.warning("starting it again (%d of %d): %s", self.restarts, self.max_restarts, why)
            self._starting = asyncio.create_task(asyncio.to_thread(self._start_again))

    def _start_again(self) -> ToolServerProcess:
        self.process.stop()  # the remaining processes of its group
        with waiting("start", f"of the tool server {self.name}, which has died"):
            return self.launch(urlsplit(self.process.url).port or 0)

    async def aclose(self) -> None:
        """Stop the server. If it is being started, it is stopped once it has started."""
        if self._starting is not None:
            with suppress(AgentrlError):  # it has not started
                self.process = await self._starting
        await asyncio.to_thread(self.process.stop)


class ToolServers:
    """Servers and clients of all tools that the environment or the multi-turn loop needs.

    Args:
        config: of the run.
        tasks: of each source, passed to the servers that are started for it. Sources share a server.
        folder: of the run; servers write to ``tools/``.
        logs: folder of their logs.
        host: the address of this machine that the started ones listen on.

    Raises:
        UserError: a tool does not exist, or its options do not fit.
    """

    def __init__(self, config: Config, tasks: TaskSources, folder: Path, logs: Path, *, host: str = LOOPBACK) -> None:
        self._config, self._tasks, self._folder, self._logs = config, tasks, folder, logs
        self._host = host
        self._services = run_services(config)
        self._source_services = {name: run_services(source) for name, source in config.by_source().items()}
        self._started: list[StartedServer] = []
        self.offered: Mapping[str, Mapping[str, Tool]] = {
            name: served_tools(config, services) for name, services in self._source_services.items()
        }
        """What a policy may call at the servers in the episodes of each source, by the tool's name."""
        self.clients: dict[str, ToolClient] = {}
        """By the tool's registered name."""
        self.urls: dict[str, str] = {}
        """URLs of all servers, by the tool's registered name."""

    async def start(self) -> None:
        """Start all servers without an address concurrently, and wait until they answer.

        Raises:
            ToolServerError: a server does not start; the message has its last log lines.
        """
        warn_unsandboxed(self._config, self._services)
        starts = [run_start(partial(self._start, name)) for name in self._services]
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        started_urls = {server.name: server.process.url for server in self._started}
        for name, service in self._services.items():
            url = started_urls.get(name) or tool_url(self._config.tools, name)
            assert url is not None
            self.urls[name] = url
            self.clients[name] = service.client(url, service_options(self._config, name, service))

    def _start(self, name: str) -> None:
        """Start a server, unless the configuration has the address of a running one."""
        if tool_url(self._config.tools, name) is not None:
            return
        tool, service = self._config.tools.get(name, ToolConfig()), self._services[name]
        options = service_options(self._config, name, service)
        arguments = service.launch_arguments(options, self._tasks_for(name), self._folder / "tools" / _file_name(name))
        log = self._logs / f"{_file_name(name)}.log"

        def launch(port: int) -> ToolServerProcess:
            return launch_tool(name, arguments, log=log, port=port, host=self._host, timeout_s=tool.start_timeout_s)

        with waiting("start", f"of the tool server {name}"):
            self._started.append(StartedServer(name, launch(tool.port), launch, tool.max_restarts))

    async def remove_left(self, find_resumed: Callable[[Collection[str]], Collection[str]]) -> None:
        """Let services whose servers the run has started remove what an earlier process of it has left.

        Args:
            find_resumed: see `ToolService.remove_left`.
        """
        for server in self._started:
            folder = self._folder / "tools" / _file_name(server.name)
            service = self._services[server.name]
            options = service_options(self._config, server.name, service)
            count = await asyncio.to_thread(service.remove_left, options, folder, find_resumed)
            if count:
                _log.info("%s: removed %d machines of episodes that begin again or have ended", server.name, count)

    def source_clients(self, source: str) -> dict[str, ToolClient]:
        """Return the clients of the tools that a source needs, by registered name."""
        return {name: self.clients[name] for name in self._source_services[source]}

    def _tasks_for(self, tool: str) -> TaskSet:
        """Return the tasks of the sources that need a tool, for its server."""
        needing = {name: tasks for name, tasks in self._tasks.items() if tool in self._source_services.get(name, ())}
        distinct = list({id(tasks): tasks for tasks in needing.values()}.values())
        return distinct[0] if len(distinct) == 1 else JoinedCorpora(tool, needing)

    async def aclose(self) -> None:
        """Close the clients and stop the servers that were started."""
        for client in self.clients.values():
            await client.aclose()
        for server in self._started:
            await server.aclose()

    def check(self) -> None:
        """Start servers again that have died; raise if one died too often: see `StartedServer.check`."""
        for server in self._started:
            server.check()


def _file_name(tool: str) -> str:
    return re.sub(r"[^\w.-]+", "_", tool)  # the name may be path/to/file.py:name
