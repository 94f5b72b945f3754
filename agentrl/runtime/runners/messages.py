"""Messages between a run's process and its runner processes: pickled frames on a socket, each with its length first.

Samplers of fleets are sent as the fleet's number: each process has its own.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.data.jobs import Job
from agentrl.episode.runner import SamplingChange
from agentrl.episode.state import SavedStates
from agentrl.inference.client.engine_state import FleetUpdate, RequestsInProgress
from agentrl.inference.client.prefix_ages import BlockUse
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.obs.remote_waits import WaitBegun, WaitEnded

PULSE_S = 1.0
"""Seconds between two signs of life of a runner."""
_LENGTH_BYTES = 8
TOKEN_VARIABLE = "AGENTRL_RUNNER_TOKEN"
"""Environment variable of a runner on another machine: what it sends first, so that its messages are read."""
_KEEPALIVE_S = 5
_LOST_S = 20
"""Seconds after which a connection to a machine is closed that does not answer."""
BUFFER_BYTES = 1 << 22
"""Received bytes above which a reader waits for them to be used."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a runner process."""

    config: Config
    """Configuration of the run, with the addresses of its tool servers."""
    model: Path
    """Folder of the tokenizer."""
    episodes: int
    """That may run at the same time."""
    folder: Path
    """Working directory of the run: of relative paths in its configuration."""


@dataclass(frozen=True, slots=True)
class UpdateFleet:
    """The engines of a fleet have changed; answered with `FleetRequests`."""

    fleet: int
    number: int
    """Number of the message."""
    update: FleetUpdate


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Episodes to run in one call of `EpisodeRunner.run_many`."""

    group: int
    jobs: Sequence[Job]
    fleet: int
    """That samples."""
    sampling: SamplingChange | None
    """In place of the sampling parameters of training."""
    saved: SavedStates | None


@dataclass(frozen=True, slots=True)
class CancelGroup:
    """Cancel the episodes of a group; answered with `GroupEnded`."""

    group: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel all episodes and end."""


ToRunner = Setup | UpdateFleet | RunGroup | CancelGroup | Stop
"""What a runner process receives."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The runner takes groups."""


@dataclass(frozen=True, slots=True)
class FleetRequests:
    """The answer to an `UpdateFleet`."""

    number: int
    requests: Mapping[str, RequestsInProgress]
    """By engine."""


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An episode of a group has ended, and is not graded."""

    group: int


@dataclass(frozen=True, slots=True)
class FleetDemand:
    """The runner has requests to a fleet, or has none any more. Sent only of fleets that share GPUs in turn."""

    fleet: int
    has_requests: bool


@dataclass(frozen=True, slots=True)
class RolloutDone:
    """A rollout with its reward."""

    group: int
    record: bytes
    """See `agentrl.obs.records`."""


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """No episode of a group runs any more."""

    group: int
    order: Sequence[int]
    """The numbers of its `RolloutDone`s, from 0, in the order of its jobs."""
    error: BaseException | None = None
    """What ended it."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Sent every second by the runner's event loop."""

    longest_wait: str
    """Longest wait of its episodes, in words."""
    cpu_s: float
    """CPU time of the process so far."""
    counts: Sequence[Counter[str]]
    """Counts of all requests so far, by fleet; see `RoutedSampler`."""
    discarded_tokens: Sequence[int]
    block_uses: Sequence[Mapping[str, Sequence[BlockUse]]] = ()
    """Block uses of replies since the last pulse, by fleet and engine."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits that have begun or ended; sent before each `Pulse`, and before the end of a group."""

    sent_at: float
    """On `time.monotonic`'s clock of the runner."""
    progress: bool
    """Whether one has ended without an error since the last message."""
    events: Sequence[WaitBegun | WaitEnded]


@dataclass(frozen=True, slots=True)
class Logged:
    """A message of the runner's log, from warnings on."""

    level: int
    text: str
    """With its traceback, if it has one."""


FromRunner = Logged | Ready | FleetRequests | FleetDemand | EpisodeEnded | RolloutDone | GroupEnded | Waits | Pulse
"""What it sends."""


FleetNumber = Callable[[RoutedSampler], int]
"""Returns the number of a sampler's fleet."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, fleet_number: FleetNumber) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._fleet_number = fleet_number

    def persistent_id(self, obj: object) -> int | None:
        return self._fleet_number(obj) if isinstance(obj, RoutedSampler) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, fleet_sampler: Callable[[int], RoutedSampler]) -> None:
        super().__init__(file)
        self._fleet_sampler = fleet_sampler

    def persistent_load(self, pid: int) -> RoutedSampler:
        return self._fleet_sampler(pid)


def encode_for_runner(message: ToRunner, fleet_number: FleetNumber) -> bytes:
    """Return a message to a runner as a frame.

    Raises:
        Exception: something in it cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file, fleet_number).dump(message)
    return _frame(file.getvalue())


def encode_for_run(message: FromRunner) -> bytes:
    """Return a message of a runner as a frame. It has no samplers, so nothing in it is looked at for them."""
    return _frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Wait for the next frame; None: the other process is gone, or has closed the connection."""
    try:
        size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        return None


async def read_from_run(reader: asyncio.StreamReader, fleet_sampler: Callable[[int], RoutedSampler]) -> ToRunner | None:
    """Wait for the next message to this runner; see `read_frame`."""
    data = await read_frame(reader)
    return None if data is None else _Unpickler(io.BytesIO(data), fleet_sampler).load()


async def read_from_runner(reader: asyncio.StreamReader) -> FromRunner | None:
    """Wait for the next message of a runner; see `read_frame`."""
    data = await read_frame(reader)
    return None if data is None else pickle.loads(data)


def detect_loss(writer: asyncio.StreamWriter) -> None:
    """Have a connection to another machine close when that is lost."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _LOST_S // _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_S)
