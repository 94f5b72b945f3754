"""A runner process: renders, parses, runs environments, calls tools, samples and grades, and sends finished rollouts.

``python -m agentrl.runtime.runners.process SOCKET`` serves a socket until it is closed: a file descriptor, or on another machine
the ``HOST:PORT`` at which the run's process listens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from typing_extensions import override

from agentrl.config.judges import time_shared_judges
from agentrl.config.obs import ObsConfig
from agentrl.core.child_process import ENDING_SIGNALS, exit_with_parent, raise_file_limit
from agentrl.core.errors import AgentrlError, RunnerError
from agentrl.core.types import Rollout
from agentrl.episode.runner import EpisodeRunner, EpisodeSlots, SamplingChange
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.mirror import MirroredFleet
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.models.reference_policy import resolve_frozen
from agentrl.obs.records import encode_record
from agentrl.obs.remote_waits import GROUP, WaitLog
from agentrl.obs.trace import KINDS
from agentrl.obs.waiting import REQUEST, ROLLOUT, WaitRegistry, waiting
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.episodes import make_runner, open_renderer
from agentrl.runtime.garbage import rare_collections
from agentrl.runtime.judges import JudgeModel, OtherModels, engine_judges, open_judge_models
from agentrl.runtime.runners.messages import (
    BUFFER_BYTES,
    PULSE_S,
    TOKEN_VARIABLE,
    CancelGroup,
    EpisodeEnded,
    FleetDemand,
    FleetRequests,
    FromRunner,
    GroupEnded,
    Logged,
    Pulse,
    Ready,
    RolloutDone,
    RunGroup,
    Setup,
    Stop,
    UpdateFleet,
    Waits,
    detect_loss,
    encode_for_run,
    read_from_run,
)
from agentrl.runtime.tool_servers import ToolServers

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunnerServices:
    """What the episodes of a runner process need."""

    setup: Setup
    renderer: ChatRenderer
    tools: ToolServers
    vocabulary: Vocabulary
    judges: Mapping[str, JudgeModel]
    """By ``judge.model``."""
    report_demand: Callable[[int, bool], None]
    """Called with the number of a fleet that shares GPUs in turn when it has got a first request, or has none any more."""
    fleets: list[MirroredFleet] = field(default_factory=list)
    """By number: the run's own, those of frozen roles, those of judges, then further ones."""
    _slots: EpisodeSlots = field(init=False)
    _runners: dict[tuple[int, SamplingChange | None], EpisodeRunner] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Make room for the episodes."""
        self._slots = EpisodeSlots(self.setup.episodes)

    @classmethod
    async def open(
        cls, setup: Setup, exits: AsyncExitStack, report_demand: Callable[[int, bool], None]
    ) -> RunnerServices:
        """Load the tokenizer, and make clients of the tool servers, which ``exits`` closes."""
        renderer, vocabulary = open_renderer(setup.config, setup.model)
        tools = ToolServers(setup.config, {}, Path(), Path())
        exits.push_async_callback(tools.aclose)
        await tools.start()
        return cls(setup, renderer, tools, vocabulary, open_judge_models(setup.config), report_demand)

    @property
    def _first_judge(self) -> int:
        """Number of the first judge's fleet."""
        return 1 + len(resolve_frozen(self.setup.config))

    def fleet(self, number: int) -> MirroredFleet:
        """Return the fleet with a number, which has no engines yet if it is new."""
        vocabularies = {self._first_judge + index: model.vocabulary for index, model in enumerate(self.judges.values())}
        while len(self.fleets) <= number:
            vocabulary = vocabularies.get(len(self.fleets), self.vocabulary)
            self.fleets.append(MirroredFleet(self.setup.config.sampler.request_timeout_s, vocabulary))
            if time_shared_judges(self.setup.config):
                self._report(len(self.fleets) - 1)
        return self.fleets[number]

    def _report(self, number: int) -> None:
        sampler = self.fleets[number].sampler
        sampler.on_demand = lambda: self.report_demand(number, sampler.has_requests)

    def fleet_sampler(self, number: int) -> RoutedSampler:
        """Return the sampler of a fleet."""
        return self.fleet(number).sampler

    def runner(self, fleet: int, sampling: SamplingChange | None) -> EpisodeRunner:
        """Return the runner of episodes that a fleet samples."""
        if (fleet, sampling) not in self._runners:
            frozen = {
                name: self.fleet_sampler(1 + index) for index, name in enumerate(resolve_frozen(self.setup.config))
            }
            judges = {name: self.fleet_sampler(self._first_judge + index) for index, name in enumerate(self.judges)}
            models = OtherModels(frozen, engine_judges(self.judges, judges))
            runner = make_runner(
                self.setup.config, self.renderer, self.fleet_sampler(fleet), self.tools, models, self._slots
            )
            self._runners[fleet, sampling] = runner if sampling is None else runner.with_sampling(sampling)
        return self._runners[fleet, sampling]


class _LogSender(logging.Handler):
    """Sends warnings and errors to the run's process, which shows them."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter())
        self._send, self._loop = send, asyncio.get_running_loop()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._send, Logged(record.levelno, self.format(record)))


class RunnerServer:
    """Runs the groups that it receives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._wait_log = WaitLog()
        self._waits = WaitRegistry([self._wait_log])
        self._sent_progress = 0.0
        """When the last wait had ended whose end was sent."""
        self._services: RunnerServices

    async def serve(self) -> None:
        """Serve until the connection is closed, or the end is requested."""
        logging.getLogger().addHandler(_LogSender(self._send))
        async with AsyncExitStack() as exits:
            setup = await read_from_run(self._reader, lambda _: RoutedSampler())
            if not isinstance(setup, Setup):
                return
            os.chdir(setup.folder)
            self._wait_log.kinds = _sent_kinds(setup.config.obs)
            self._waits.enter()
            self._services = await RunnerServices.open(
                setup, exits, lambda fleet, has_requests: self._send(FleetDemand(fleet, has_requests))
            )
            exits.enter_context(rare_collections())
            self._send(Ready())
            pulse = asyncio.create_task(self._send_pulses())
            try:
                while await self._receive():
                    pass
            finally:
                pulse.cancel()
                for task in self._groups.values():
                    task.cancel()
                await asyncio.gather(*self._groups.values(), return_exceptions=True)
                await asyncio.gather(*(fleet.aclose() for fleet in self._services.fleets))

    async def _receive(self) -> bool:
        """Act on the next message; return whether others may follow."""
        message = await read_from_run(self._reader, self._services.fleet_sampler)
        match message:
            case UpdateFleet(fleet, number, update):
                self._send(FleetRequests(number, self._services.fleet(fleet).receive(update)))
            case RunGroup(group):
                task = self._groups[group] = asyncio.create_task(self._run(message))
                task.add_done_callback(lambda _: self._groups.pop(group))
            case CancelGroup(group):
                if (running := self._groups.get(group)) is not None:
                    running.cancel()
            case None | Stop():
                return False
            case _:
                raise AssertionError(f"a runner gets no {type(message).__name__}")
        return True

    async def _run(self, group: RunGroup) -> None:
        """Run a group, and send its rollouts as they are finished."""
        numbers: dict[int, int] = {}

        def send_rollout(rollout: Rollout) -> None:
            numbers[id(rollout)] = len(numbers)
            self._send(RolloutDone(group.group, encode_record(rollout)))

        error: BaseException | None = None
        order: list[int] = []
        try:
            with waiting(GROUP, str(group.group)):
                rollouts = await self._services.runner(group.fleet, group.sampling).run_many(
                    group.jobs,
                    send_rollout,
                    on_ended=lambda: self._send(EpisodeEnded(group.group)),
                    check_dropped=False,
                    saved=group.saved,
                )
            order = [numbers[id(rollout)] for rollout in rollouts]
        except asyncio.CancelledError:
            pass
        except AgentrlError as raised:
            error = raised
        except Exception as raised:  # the run's process may not have its class
            _log.exception("episodes of task %s", group.jobs[0].task.id)
            error = RunnerError(f"episodes of task {group.jobs[0].task.id!r}: {type(raised).__name__}: {raised}")
        self._send_waits()
        self._send(GroupEnded(group.group, order, error))

    async def _send_pulses(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._send_waits()
            waits = self._waits.innermost_waits()
            samplers = [fleet.sampler for fleet in self._services.fleets]
            self._send(
                Pulse(
                    waits[0].text if waits else "",
                    time.process_time(),
                    [sampler.counts for sampler in samplers],
                    [fleet.discarded_tokens for fleet in self._services.fleets],
                    [fleet.take_block_uses() for fleet in self._services.fleets],
                )
            )

    def _send_waits(self) -> None:
        progress, last = self._waits.last_progress, self._sent_progress
        self._sent_progress = progress
        self._send(Waits(time.monotonic(), progress != last, self._wait_log.take()))

    def _send(self, message: FromRunner) -> None:
        self._writer.write(encode_for_run(message))


def _sent_kinds(obs: ObsConfig) -> Collection[str] | None:
    """Return the kinds of waits that the run's process needs, besides those around groups; None: all."""
    if obs.otlp is not None:
        return None
    return KINDS if obs.trace else (ROLLOUT, REQUEST)


async def _main(address: str) -> None:
    host, _, port = address.rpartition(":")
    if host:
        reader, writer = await asyncio.open_connection(host, int(port), limit=BUFFER_BYTES)
        detect_loss(writer)
        writer.write(os.environ.pop(TOKEN_VARIABLE).encode())
    else:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(port)), limit=BUFFER_BYTES)
    await RunnerServer(reader, writer).serve()
    writer.close()


def main() -> None:
    """Serve the socket that the argument names."""
    exit_with_parent()
    # They may reach all processes of a run: the run's process ends this one.
    for ending_signal in (signal.SIGINT, *ENDING_SIGNALS):
        signal.signal(ending_signal, signal.SIG_IGN)
    raise_file_limit()
    uvloop.run(_main(sys.argv[1]))  # a sixth less CPU time a turn than asyncio's loop


if __name__ == "__main__":
    main()
