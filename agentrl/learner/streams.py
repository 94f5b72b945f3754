"""Streams of weight buckets on the ranks that gather them: the first rank leads, the others do what it commands.

The driver calls the leader for each bucket, and every other rank once a stream: commands pass from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agentrl.core.errors import LearnerError
from agentrl.learner.export import RankBucket

GroupT = TypeVar("GroupT")
HandlesOrError = list[str] | LearnerError
"""IPC handles of the bucket on a rank; see `WeightBucket.ipc_handles`."""

_IDLE = timedelta(days=1)
"""Time limit of the wait for a command: the driver has its own limits, and ends the ranks of a failed one."""


class _Command(IntEnum):
    STOP = 0
    NEXT = 1
    IPC_HANDLES = 2


def order_in_waves(streams: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return streams in waves: those of a wave have no rank in common, and may gather at the same time.

    Ranks take part in their streams in the order of `stream_order`.

    Args:
        streams: the ranks of each.
    """
    waves: list[list[tuple[int, ...]]] = []
    next_wave: dict[int, int] = {}
    for ranks in sorted(streams, key=stream_order):
        wave = max(next_wave.get(rank, 0) for rank in ranks)
        waves.extend([] for _ in range(wave + 1 - len(waves)))
        waves[wave].append(ranks)
        next_wave |= dict.fromkeys(ranks, wave + 1)
    return waves


def stream_order(ranks: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the sort key of streams on all ranks: large ones first."""
    return -len(ranks), tuple(ranks)


def make_groups(
    rank_groups: Sequence[tuple[int, ...]], make: Callable[[tuple[int, ...]], GroupT]
) -> dict[tuple[int, ...], GroupT]:
    """Return groups of this rank and others, by their ranks. Collective: torch wants all ranks to create all groups in one order.

    Groups that only members create have names of torch that differ between ranks with different numbers of other groups.

    Args:
        rank_groups: the ranks of the groups of which this rank is one.
        make: calls `torch.distributed.new_group`.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, tuple(rank_groups))
    order = sorted({ranks for groups in by_rank for ranks in groups}, key=stream_order)
    groups = {ranks: make(ranks) for ranks in order}
    return {ranks: groups[ranks] for ranks in rank_groups}


class CommandGroup:
    """The ranks of a stream, of which the first sends the others commands: over gloo, also while the device computes."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Join ``ranks``, if this rank is one of them; see `make_groups`."""
        self._group: Any = dist.new_group(list(ranks), _IDLE, "gloo")

    def send(self, command: int) -> None:
        """On the first rank: send a command to all others."""
        dist.broadcast(torch.tensor([command], dtype=torch.int64), group=self._group, group_src=0)

    def receive(self) -> int:
        """On the others: wait for the next command."""
        command = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(command, group=self._group, group_src=0)
        return int(command)

    def gather(self, handles: HandlesOrError) -> list[HandlesOrError]:
        """Return what the ranks have on the first rank, an empty list on the others. Collective."""
        results: list[HandlesOrError] | None = [[]] * self._group.size() if dist.get_rank(self._group) == 0 else None
        dist.gather_object(handles, results, group=self._group, group_dst=0)
        return results or []


class RankStream:
    """A stream on one of its ranks."""

    def __init__(self, buckets: Iterator[RankBucket], group: CommandGroup | None) -> None:
        """Take part in a stream.

        Args:
            buckets: gathers them, each in place of the one before.
            group: of the stream's ranks; None if there is only one.
        """
        self._buckets = buckets
        self._group = group
        self._bucket: RankBucket | None = None

    @property
    def bucket(self) -> RankBucket:
        """The current bucket."""
        assert self._bucket is not None, "next comes first"
        return self._bucket

    def next(self) -> RankBucket | None:
        """On the leader: have all ranks gather the next bucket; return None, and end the stream, after the last."""
        self._send(_Command.NEXT)
        bucket = self._gather_next()
        if bucket is None:
            self.stop()
        return bucket

    def ipc_handles(self) -> list[str]:
        """On the leader: return the current bucket's handles by rank; see `WeightBucket.ipc_handles`.

        Raises:
            LearnerError: a rank has none.
        """
        self._send(_Command.IPC_HANDLES)
        handles: list[str] = []
        for result in self._gather_handles():
            if isinstance(result, LearnerError):
                raise result
            handles += result
        return handles

    def stop(self) -> None:
        """On the leader: end the stream on all ranks, if it has not ended."""
        self._send(_Command.STOP)
        self._release()

    def follow(self) -> None:
        """On the other ranks: do what the leader commands, until the stream ends."""
        assert self._group is not None
        while True:
            match _Command(self._group.receive()):
                case _Command.NEXT:
                    self._gather_next()
                case _Command.IPC_HANDLES:
                    self._gather_handles()
                case _Command.STOP:
                    self._release()
                    return

    def _gather_next(self) -> RankBucket | None:
        self._bucket = next(self._buckets, None)
        return self._bucket

    def _gather_handles(self) -> list[HandlesOrError]:
        """Gather on the leader what each rank has."""
        try:
            handles: HandlesOrError = self.bucket.ipc_handles()
        except LearnerError as error:
            handles = error
        return [handles] if self._group is None else self._group.gather(handles)

    def _send(self, command: _Command) -> None:
        if self._group is not None:
            self._group.send(command)

    def _release(self) -> None:
        """Let the bucket's memory be freed, and with it what gathers buckets."""
        self._buckets, self._bucket = iter(()), None
