"""Starts of machines: plain ``docker run``, opened cold, and opened from the warm pool."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.containers import ContainersConfig
from agentrl.containers.daemon import daemon_urls
from agentrl.containers.machine import Command
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec
from agentrl.core.errors import MissingError


@dataclass(frozen=True)
class Starts:
    """Times of one way to start."""

    name: str
    median_ms: float
    """Until a machine is ready for commands."""
    command_ms: float
    """Median of the first command in it, ``true``."""
    starts_per_s: float
    """Several at the same time, each removed after its first command."""


@dataclass
class ContainersBench:
    """Measures starts.

    Args:
        url: the daemon; None: ``DOCKER_HOST`` or the usual socket.
        image: which it has.
        starts: of each measurement.
        concurrency: machines at the same time.
    """

    url: str | None
    image: str
    starts: int
    concurrency: int

    def run(self, progress: Callable[[str], None]) -> Iterator[Starts]:
        """Measure, and yield what was measured.

        Raises:
            MissingError: there is no ``docker`` program.
        """
        progress("docker run")
        yield self._docker_run()
        for name, warm in (("opened cold", 0), ("from the warm pool", self.concurrency)):
            progress(name)
            yield asyncio.run(self._machines(name, warm))

    def _docker_run(self) -> Starts:
        url = self.url or daemon_urls(ContainersConfig())[0]
        docker = ["docker", "-H", url]

        def start() -> tuple[float, float]:
            begin = time.perf_counter()
            command = [*docker, "run", "-d", "--network", "none", self.image, "sleep", "1000"]
            container = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            started = time.perf_counter()
            subprocess.run([*docker, "exec", container, "true"], check=True, capture_output=True)
            ended = time.perf_counter()
            subprocess.run([*docker, "rm", "-f", container], check=True, capture_output=True)
            return started - begin, ended - started

        async def all_starts() -> list[tuple[float, float]]:
            slots = asyncio.Semaphore(self.concurrency)

            async def one_start() -> tuple[float, float]:
                async with slots:
                    return await asyncio.to_thread(start)

            return await asyncio.gather(*(one_start() for _ in range(self.starts)))

        try:
            start()
        except (OSError, subprocess.CalledProcessError) as error:
            raise MissingError(f"docker run does not work: {error}") from error
        alone = [start() for _ in range(self.starts)]
        begin = time.perf_counter()
        asyncio.run(all_starts())
        return _starts("docker run", alone, self.starts / (time.perf_counter() - begin))

    async def _machines(self, name: str, warm: int) -> Starts:
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as state:
            hosts = (self.url,) if self.url is not None else ()
            config = ContainersConfig(hosts=hosts, machines=2 * self.concurrency, warm=warm, state=Path(state))
            async with Machines(config, "bench") as machines:
                spec = MachineSpec(image=self.image, network="no-network")

                async def start(key: str) -> tuple[float, float]:
                    begin = time.perf_counter()
                    async with await machines.open(spec, key) as machine:
                        opened = time.perf_counter()
                        await machine.run(Command("true"))
                        return opened - begin, time.perf_counter() - opened

                await start("first")
                alone = []
                for number in range(self.starts):
                    await machines.warm_pool.wait_full()
                    alone.append(await start(f"alone {number}"))
                await machines.warm_pool.wait_full()
                slots = asyncio.Semaphore(self.concurrency)

                async def start_in_turn(number: int) -> None:
                    async with slots:
                        await start(str(number))

                begin = time.perf_counter()
                await asyncio.gather(*(start_in_turn(number) for number in range(self.starts)))
                return _starts(name, alone, self.starts / (time.perf_counter() - begin))


def _starts(name: str, alone: list[tuple[float, float]], starts_per_s: float) -> Starts:
    medians = [sorted(times)[len(times) // 2] * 1000 for times in zip(*alone, strict=True)]
    return Starts(name, medians[0], medians[1], starts_per_s)
