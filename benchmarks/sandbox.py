"""``agentrl bench sandbox``: backends alone, docker exec as a baseline, and through server and client."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import UserError
from agentrl.data.task_sources import NoTasks
from agentrl.sandbox.registry import make_backend
from agentrl.toolserver.launch import launch_tool
from agentrl.toolserver.service import find_service
from benchmarks.sandbox_calls import SandboxTimes, client_opener, docker_exec_opener, measure, measure_backend

Row = tuple[str, SandboxTimes]
"""Name of a measurement, and its times."""


@dataclass(frozen=True, slots=True)
class SandboxBench:
    """Options of the benchmark; see the command."""

    backends: Sequence[str]
    sessions: Sequence[int]
    calls: int
    exec_sessions: Sequence[int]
    exec_calls: int
    docker: dict[str, Any]
    """``docker_url`` and ``image`` of the sandbox section, if they differ from the defaults."""

    def run(self, progress: Callable[[str], None]) -> Iterator[Row]:
        """Yield the measurements one after the other, once all backends have started.

        Raises:
            UserError: one does not work here; nothing was measured then.
        """
        for name in self.backends:
            progress(f"{name} starts")
            asyncio.run(_try_backend(self._config(name)))
        cores = len(os.sched_getaffinity(0))
        for name in self.backends:
            config = self._config(name)
            # Containers are children of the daemon and not limited to this process's cores.
            for core_count in (1, cores) if name != "docker" and cores > 1 else (cores,):
                progress(f"{name} alone, {core_count} core(s)")
                for times in measure_backend(partial(make_backend, config), self.sessions, self.calls, core_count):
                    yield f"{name}, {core_count} core{'s' if core_count > 1 else ''}", times
            progress(f"{name} through server and client")
            for sessions in self.sessions:
                yield f"{name}, server + client", asyncio.run(self._through_server(config, sessions))
        if "docker" in self.backends:
            progress("docker exec")
            for sessions in self.exec_sessions:
                yield "docker exec", asyncio.run(self._docker_exec(sessions))

    def _config(self, name: str) -> SandboxConfig:
        return SandboxConfig.model_validate({"backend": name, **(self.docker if name == "docker" else {})})

    async def _through_server(self, config: SandboxConfig, sessions: int) -> SandboxTimes:
        options = {"sandbox": config.model_dump(), "server": {"max_sessions": sessions}}
        service = find_service("python")
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as text:
            folder = Path(text)
            arguments = service.launch_arguments(options, NoTasks(), folder)
            with await asyncio.to_thread(launch_tool, "python", arguments, log=folder / "server.log") as server:
                client = service.client(server.url, options)
                try:
                    async with client_opener(client) as opener:
                        return await measure(opener, sessions, self.calls)
                finally:
                    await client.aclose()

    async def _docker_exec(self, sessions: int) -> SandboxTimes:
        async with docker_exec_opener(self._config("docker")) as opener:
            return await measure(opener, sessions, self.exec_calls)


async def _try_backend(config: SandboxConfig) -> None:
    try:
        backend = make_backend(config)
        backend.check(config)
        async with backend:
            pass
    except UserError as error:
        raise UserError(f"{error}. Or leave {config.backend} out of --backends") from error
