"""The Ray actor of one learner rank. It imports torch only when it is set up, so that it starts fast."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import ray

from agentrl.config.learner import LearnerConfig
from agentrl.core.child_process import LOOPBACK
from agentrl.distributed.base import TensorSpec

if TYPE_CHECKING:
    import torch

    from agentrl.learner.base import LearnerRank, RankOptions
    from agentrl.learner.export import RankBucket, WeightExporter

BucketHead = tuple[tuple[TensorSpec, ...], bool]
"""The tensors of a bucket, and whether it is the last."""


class LearnerActor:
    """Holds one `LearnerRank` and what exports its weights. `RayLearnerGroup` calls all ranks in the same order."""

    learner: LearnerRank
    """Loaded by `set_up`."""
    exporter: WeightExporter
    """Exports the learner's weights."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._store: Any = None
        self._buckets: Iterator[RankBucket] = iter(())
        self._bucket: RankBucket | None = None

    @property
    def bucket(self) -> RankBucket:
        """The current bucket of weights."""
        assert self._bucket is not None, "next_bucket comes first"
        return self._bucket

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

    def set_up(self, options: RankOptions, host: str, port: int, same_machine: bool, gpus: Sequence[str] = ()) -> int:
        """Join the process group, then load the model, on ``gpus`` if Ray assigned none to this actor; return its
        `LearnerRank.data_parallel_rank`.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from agentrl.distributed.broadcast_group import gloo_on
        from agentrl.learner.device import collectives, pick_device
        from agentrl.learner.export import WeightExporter
        from agentrl.learner.registry import make_backend

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
        self.exporter = WeightExporter(self.learner, self.learner.adapters)
        return self.learner.data_parallel_rank

    def sleep(self) -> None:
        """Release the device's memory, including that of the bucket."""
        self._buckets, self._bucket = iter(()), None
        self.learner.sleep()

    def first_bucket(self, bucket_bytes: int, dtype: str | None) -> BucketHead | None:
        """Start to iterate over the weights; see `next_bucket`."""
        self._bucket = None
        self._buckets = cast("Iterator[RankBucket]", self.exporter.buckets(bucket_bytes, dtype))
        return self.next_bucket()

    def next_bucket(self) -> BucketHead | None:
        """Gather the next bucket in place of the current one, and return its head; None after the last."""
        self._bucket = next(self._buckets, None)
        return None if self._bucket is None else (tuple(self._bucket.specs), self._bucket.last)

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
