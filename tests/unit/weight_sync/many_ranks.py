"""Learner ranks and engines of a weight sync, in threads of this process: they count what the driver calls, and who sends.

The driver's side, the ranks' streams, and the transports are agentrl's. Fakes are Ray, what carries commands and weights from
process to process, and the engines.
"""

from __future__ import annotations

import asyncio
import queue
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from agentrl.cluster.learner_actor import LearnerActor, RankLayout
from agentrl.cluster.learner_group import RayLearnerGroup
from agentrl.config.learner import LearnerConfig
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.distributed.flat_bucket import total_bytes, views
from agentrl.learner.export import NamedTensors, WeightExporter, plan_buckets
from agentrl.testing import FakeEngine
from tests.unit.learner.joining_engine import JoiningEngine

Stream = tuple[int, ...]
"""Its ranks, the sender first."""


@dataclass(frozen=True)
class Layout:
    """Learner ranks as Megatron-Core numbers them. Stages are the slowest dimension, tensor parallelism is the fastest."""

    ranks: int
    tensor: int = 1
    stages: int = 1
    experts: int = 1
    """Expert-parallel ranks of a stage, each with a part of the experts; expert tensor parallelism is 1."""
    senders: int = 1
    """Ranks of a stage that send experts."""

    def parts(self, weights: Mapping[str, torch.Tensor]) -> dict[Stream, dict[str, torch.Tensor]]:
        """Return the weights by stream. Names have the numbers of layer and expert."""
        parts: dict[Stream, dict[str, torch.Tensor]] = defaultdict(dict)
        layers = 1 + max(int(name.split(".")[2]) for name in weights)
        for name, weight in weights.items():
            first = int(name.split(".")[2]) * self.stages // layers * (self.ranks // self.stages)
            size = self.tensor
            if ".experts." in name:
                size = self.experts // self.senders
                first += int(name.split(".experts.")[1].split(".")[0]) % self.senders * size
            parts[tuple(range(first, first + size))][name] = weight
        return parts


def make_weights(layers: int, experts: int) -> dict[str, torch.Tensor]:
    """Return weights of which the loader joins two in each layer."""
    modules = ("self_attn.q_a_proj", "self_attn.o_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate")
    modules += tuple(f"mlp.experts.{number}.up_proj" for number in range(experts))
    names = [f"model.layers.{layer}.{module}.weight" for layer in range(layers) for module in modules]
    return {name: torch.full((3 + 4 * (number % 3),), float(number)) for number, name in enumerate(names)}


def driver_calls(ranks: int, streams: Sequence[Stream], buckets: int) -> int:
    """Return the driver's calls of a sync of a kept group: on paper.

    One of each rank begins the pass, one of each follower takes it through a stream. A sender is called
    to gather each bucket, and to broadcast it, and once more after its last.
    """
    return ranks + sum(len(stream) - 1 for stream in streams) + 2 * buckets + len(streams)


def count_buckets(parts: Mapping[Stream, Mapping[str, torch.Tensor]], bucket_bytes: int) -> int:
    """Return the number of buckets of streams: on paper."""
    return sum(len(plan_buckets(NamedTensors(part).specs(), bucket_bytes)) for part in parts.values())


class FakeRay:
    """Calls of actors run in their threads."""

    @staticmethod
    def wait(
        refs: Sequence[Future[Any]], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        done = wait(refs, timeout, FIRST_COMPLETED).done
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    @staticmethod
    def get(refs: Any, timeout: float | None = None) -> Any:
        return [ref.result(timeout) for ref in refs] if isinstance(refs, list) else refs.result(timeout)


class Actor:
    """A handle of a rank: its calls run one after the other in a thread, and are counted."""

    def __init__(self, actor: LearnerActor, calls: Counter[str]) -> None:
        self.actor = actor
        self.calls = calls
        self.thread = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            self.calls[name] += 1
            if name == "__ray_call__":
                function, *arguments = arguments
                return self.thread.submit(function, self.actor, *arguments)
            return self.thread.submit(getattr(self.actor, name), *arguments)

        return SimpleNamespace(remote=remote)


@dataclass
class Network:
    """What processes send each other."""

    sent: Counter[int] = field(default_factory=Counter)
    """Bytes by the sender's rank: a broadcast is sent once, and passed on from engine to engine."""
    commands: Counter[Stream] = field(default_factory=Counter)
    """Commands that leaders of streams have sent."""
    wires: dict[str, list[queue.Queue[torch.Tensor]]] = field(default_factory=dict)
    """Of the broadcast groups, by name: to each engine."""


class Commands:
    """A command group on one rank."""

    def __init__(self, ranks: Stream, queues: list[queue.Queue[Any]], network: Network) -> None:
        self.ranks, self.queues, self.network = ranks, queues, network
        self.index = 0

    def on_rank(self, rank: int) -> Commands:
        group = Commands(self.ranks, self.queues, self.network)
        group.index = self.ranks.index(rank)
        return group

    def send(self, command: int) -> None:
        self.network.commands[self.ranks] += 1
        for commands in self.queues[1:]:
            commands.put(command)

    def receive(self) -> int:
        return int(self.queues[self.index].get(timeout=30))


class Part(NamedTensors):
    """The weights of a stream."""

    def __init__(self, ranks: Stream, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.ranks = ranks


class Rank(NamedTensors):
    """A learner rank whose ranks send parts of the weights."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parts: list[Part]) -> None:
        super().__init__(tensors)
        self.parts = parts

    def streams(self) -> list[Part]:
        return self.parts


class Exporter(WeightExporter):
    """Broadcasts over the network of the test."""

    def __init__(self, rank: int, network: Network) -> None:
        super().__init__(NamedTensors({}))
        self.rank, self.network = rank, network
        self.group_name = ""

    def open_group(
        self, urls: Sequence[str], size: int, backend: str, timeout_s: float, sender: int = 0
    ) -> WeightGroup:
        self.group_name = f"group {self.rank}"
        self.network.wires[self.group_name] = [queue.Queue() for _ in urls]
        return WeightGroup(self.group_name, "127.0.0.1", 1, size, backend)

    def join_group(self, group: WeightGroup, sender: int = 0) -> None:
        assert group.name == self.group_name

    def leave_group(self) -> None:
        self.group_name = ""

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
        self.network.sent[self.rank] += flat.nbytes
        for wire in self.network.wires[self.group_name]:
            wire.put(flat.clone())


class Engine(FakeEngine):
    """Receives broadcasts from the network, and loads weights as SGLang's loaders do: a half without the other is lost."""

    def __init__(self, number: int, names: Sequence[str], network: Network) -> None:
        super().__init__(number)
        self.network = network
        self.loader = JoiningEngine(names)
        self.groups_joined = 0

    async def join(self, group: WeightGroup, first_rank: int) -> None:
        self.groups_joined += 1

    async def leave(self, group: WeightGroup) -> None:
        self.events.append("leave")

    async def from_tensors(
        self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool, ranks: int = 1
    ) -> None:
        self.loader.load_weights([name for name, _ in named])
        await super().from_tensors(named, version, last=last)

    async def from_group(self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool) -> None:
        flat = await asyncio.to_thread(self.network.wires[group.name][self.number].get, timeout=30)
        assert flat.nbytes == total_bytes(*specs)
        await self.from_tensors(views(specs, flat), version, last=last)


class ManyRanks(RayLearnerGroup):
    """The driver's side of the ranks."""

    def __init__(self, layout: Layout, weights: Mapping[str, torch.Tensor], network: Network) -> None:
        parts = layout.parts(weights)
        commands = {
            ranks: Commands(ranks, [queue.Queue() for _ in ranks], network)
            for ranks in (*parts, tuple(range(layout.ranks)))
            if len(ranks) > 1
        }
        self.calls: Counter[str] = Counter()
        self._name, self._is_ready, self._over = "learner", True, None
        self._options = SimpleNamespace(config=LearnerConfig(step_timeout_s=60))  # type: ignore[assignment]
        self._actors, self._layouts = [], []
        for rank in range(layout.ranks):
            own = [Part(ranks, part) for ranks, part in parts.items() if rank in ranks]
            actor = LearnerActor(layout.ranks)
            actor._rank = rank
            actor.learner = Rank(weights, own)  # type: ignore[assignment]
            actor.exporter = Exporter(rank, network)
            actor._command_groups = {
                ranks: group.on_rank(rank)  # type: ignore[misc]
                for ranks, group in commands.items()
                if rank in ranks
            }
            self._actors.append(Actor(actor, self.calls))
            self._layouts.append(RankLayout(0, tuple(part.ranks for part in own)))

    def _check_usable(self) -> None:
        """It is never lost."""

    def _check_over(self) -> None:
        """It is never lost."""

    def close(self) -> None:
        """End the threads; a rank that waits for a command would block this."""
        self._end_streams()
        for actor in self._actors:
            actor.thread.shutdown()
