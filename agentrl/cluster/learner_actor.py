"""The Ray actor of one learner rank. It imports torch only when it is set up, so that it starts fast."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from agentrl.config.learner import LearnerConfig
from agentrl.core.child_process import LOOPBACK
from agentrl.distributed.base import TensorSpec

if TYPE_CHECKING:
    import torch

    from agentrl.learner.base import LearnerRank, RankOptions, WeightSource
    from agentrl.learner.export import RankBucket, WeightExporter
    from agentrl.learner.streams import CommandGroup, RankStream


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of a rank among all ranks. Example: ``RankLayout(0, ((0, 1), (0,)))``."""

    data_parallel_rank: int
    """See `LearnerRank.data_parallel_rank`."""
    streams: tuple[tuple[int, ...], ...] | None
    """The ranks of each stream of weights in which it takes part, see `StreamedWeights`; None: its learner has none."""


@dataclass(frozen=True, slots=True)
class BucketHead:
    """What the driver knows of a bucket."""

    specs: tuple[TensorSpec, ...]
    """Its weights, in the order of their memory."""
    last: bool
    """Whether it is the last of its stream."""
    fingerprint: int
    """See `WeightBucket.fingerprint`."""


class LearnerActor:
    """Holds one `LearnerRank` and what exports its weights. `RayLearnerGroup` calls all ranks in the same order."""

    learner: LearnerRank
    """Loaded by `set_up`."""
    exporter: WeightExporter
    """Exports the learner's weights."""

    def __init__(self, ranks: int) -> None:
        self._rank = 0
        """Known when it is set up."""
        self._ranks = ranks
        self._store: Any = None
        self._streams: dict[tuple[int, ...], RankStream] = {}
        """Those of the weight sync in progress, by their ranks."""
        self._command_groups: dict[tuple[int, ...], CommandGroup] = {}
        """By the ranks of a stream, if there are several."""

    def bucket(self, ranks: tuple[int, ...]) -> RankBucket:
        """Return the current bucket of a stream."""
        return self._streams[ranks].bucket

    def node(self, config: LearnerConfig) -> str:
        """Return the IP address of this machine, and import what `set_up` will need."""
        from agentrl.learner.registry import make_backend

        make_backend(config).rank_class()
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    def open_store(self, host: str) -> int:
        """On rank 0: open the process group's store on any free port, and return the port."""
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore(host, 0, self._ranks, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def set_up(
        self, rank: int, options: RankOptions, host: str, port: int, same_machine: bool, gpus: Sequence[str] = ()
    ) -> RankLayout:
        """Join the process group as ``rank``, then load the model, on ``gpus`` if Ray assigned none to this actor."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from agentrl.distributed.broadcast_group import gloo_on
        from agentrl.learner.base import StreamedWeights
        from agentrl.learner.device import collectives, pick_device
        from agentrl.learner.export import WeightExporter
        from agentrl.learner.registry import make_backend
        from agentrl.learner.streams import CommandGroup, make_groups

        self._rank = rank
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if self._store is None:
            self._store = TCPStore(host, port, self._ranks, is_master=False)
        device = pick_device(options.config.model_copy(update={"device": options.device.type}), local_rank=0)
        with gloo_on(LOOPBACK if same_machine else ray.util.get_node_ip_address()):  # type: ignore[no-untyped-call]
            dist.init_process_group(
                collectives(options.device.type),
                store=self._store,
                rank=self._rank,
                world_size=self._ranks,
                timeout=timedelta(seconds=options.config.step_timeout_s),
            )
            self.learner = make_backend(options.config).rank_class()(replace(options, device=device))
            streams = (
                tuple(tuple(source.ranks) for source in self.learner.streams())
                if isinstance(self.learner, StreamedWeights)
                else None
            )
            groups = {tuple(range(self._ranks)), *(streams or ())}
            self._command_groups = make_groups([ranks for ranks in groups if len(ranks) > 1], CommandGroup)
        self.exporter = WeightExporter(self.learner, self.learner.adapters)
        return RankLayout(self.learner.data_parallel_rank, streams)

    def sleep(self) -> None:
        """Release the device's memory, including that of the bucket."""
        self._streams.clear()
        self.learner.sleep()

    def open_streams(self, bucket_bytes: int, dtype: str | None, *, by_sender: bool) -> None:
        """Begin a pass over the weights. All ranks are called.

        Args:
            bucket_bytes: size of a bucket.
            dtype: weights are cast to it.
            by_sender: take part in the streams of `StreamedWeights`; else all ranks are one stream, of all weights.
        """
        from agentrl.learner.base import StreamedWeights
        from agentrl.learner.streams import RankStream, stream_order

        sources: dict[tuple[int, ...], WeightSource] = {tuple(range(self._ranks)): self.learner}
        if by_sender:
            assert isinstance(self.learner, StreamedWeights)
            sources = {tuple(source.ranks): source for source in self.learner.streams()}
        self._streams = {}
        for ranks in sorted(sources, key=stream_order):
            buckets = self.exporter.gather_buckets(sources[ranks], bucket_bytes, dtype)
            self._streams[ranks] = RankStream(buckets, self._command_groups.get(ranks))

    def follow(self, ranks: tuple[int, ...]) -> None:
        """Do in a stream what its first rank commands, until it ends."""
        self._streams[ranks].follow()

    def next_bucket(self, ranks: tuple[int, ...]) -> BucketHead | None:
        """On the first rank of a stream: gather the next bucket in place of the current one; return None after the last."""
        bucket = self._streams[ranks].next()
        return None if bucket is None else BucketHead(tuple(bucket.specs), bucket.last, bucket.fingerprint())

    def ipc_handles(self, ranks: tuple[int, ...]) -> list[str]:
        """On the first rank of a stream: return handles of the current bucket by rank."""
        return self._streams[ranks].ipc_handles()

    def stop_stream(self, ranks: tuple[int, ...]) -> None:
        """On the first rank of a stream: end it early."""
        self._streams[ranks].stop()

    def adapters(self, dtype: str | None, policy: str) -> list[tuple[str, torch.Tensor]]:
        """Return the LoRA adapters on rank 0, nothing on others."""
        adapters = self.exporter.adapters(dtype, policy)
        return adapters if self._rank == 0 else []

    @ray.method(concurrency_group="watching")
    def wait_for_end(self) -> None:
        """Block until this process ends. The call then fails, also if no other is in progress."""
        threading.Event().wait()

    @ray.method(concurrency_group="leaving")
    def leave_group(self) -> None:
        """Leave the broadcast group. Runs in a separate thread, concurrently with the call that it interrupts."""
        self.exporter.leave_group()

    @ray.method(concurrency_group="saving")
    def finish_save(self) -> None:
        """Wait until the checkpoint is written. Runs in a separate thread, while the rank trains."""
        self.learner.finish_save()
