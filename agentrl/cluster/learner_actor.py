"""One learner rank in a process of its own. torch is imported when the actor sets itself up, not before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.distributed.base import TensorSpec, WeightGroup

if TYPE_CHECKING:
    from agentrl.batch.microbatch import GlobalBatch
    from agentrl.learner.base import LearnerRank, RowLogprobs
    from agentrl.learner.export.broadcaster import SendingPlace
    from agentrl.learner.export.bucket import RankBucket

LOOPBACK = "127.0.0.1"
BucketHead = tuple[tuple[TensorSpec, ...], bool]
"""What is in a bucket, and whether it is the last."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What an actor needs to become a rank."""

    folder: Path
    """The model."""
    learner: LearnerConfig
    """How to train."""
    algo: AlgoConfig
    """The loss."""
    seed: int
    """Of random states; each rank adds its number."""
    device: str
    """``cpu`` or ``cuda``."""
    reference: Path | None = None
    """The reference policy, where the loss needs one."""


class LearnerActor:
    """Holds one `LearnerRank`. Methods are called on all ranks in the same order."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._store: Any = None
        self._learner: LearnerRank
        self._buckets: Iterator[RankBucket] = iter(())
        self._bucket: RankBucket | None = None
        self._sending: SendingPlace | None = None

    def node(self) -> str:
        """Return the address of the machine this runs on, and import what set-up will need."""
        import agentrl.learner.fsdp.rank  # noqa: F401

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    def open_store(self, host: str) -> int:
        """On rank 0: open the ranks' meeting point on any free port, and return it."""
        from torch._C._distributed_c10d import TCPStore

        self._store = TCPStore(host, 0, self._ranks, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def set_up(self, spec: RankSpec, host: str, port: int, same_machine: bool) -> None:
        """Meet the other ranks, load and shard the model."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        from agentrl.distributed.network_interface import gloo_on
        from agentrl.learner.device import collectives, pick_device
        from agentrl.learner.registry import make_rank

        if self._store is None:
            self._store = TCPStore(host, port, self._ranks, is_master=False)
        device = pick_device(spec.learner.model_copy(update={"device": spec.device}), local_rank=0)
        with gloo_on(LOOPBACK if same_machine else ray.util.get_node_ip_address()):  # type: ignore[no-untyped-call]
            dist.init_process_group(
                collectives(spec.device),
                store=self._store,
                rank=self._rank,
                world_size=self._ranks,
                timeout=timedelta(seconds=spec.learner.step_timeout_s),
            )
            self._learner = make_rank(
                spec.folder, spec.learner, spec.algo, device=device, seed=spec.seed, reference=spec.reference
            )

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """See `LearnerRank.train_step`."""
        return self._learner.train_step(batch)

    def logprobs(self, batch: GlobalBatch, policy: str) -> RowLogprobs:
        """See `LearnerRank.logprobs`."""
        return self._learner.logprobs(batch, policy)

    def first_bucket(self, bucket_bytes: int, dtype: str | None) -> BucketHead | None:
        """Begin to go through the weights; see `next_bucket`."""
        from agentrl.learner.export.bucket import held_buckets

        self._bucket = None
        self._buckets = held_buckets(self._learner, bucket_bytes, dtype)
        return self.next_bucket()

    def next_bucket(self) -> BucketHead | None:
        """Hold the next bucket in place of the one before, and say what is in it; None after the last."""
        self._bucket = next(self._buckets, None)
        return None if self._bucket is None else (tuple(self._bucket.specs), self._bucket.last)

    def bucket_bytes(self) -> Any:
        """Return the bucket's memory as an array."""
        return self._held().on_cpu().numpy()

    def save_bucket(self, file: Path) -> None:
        """See `HeldBucket.save`."""
        self._held().save(file)

    def share_bucket(self) -> str:
        """See `HeldBucket.share`."""
        return self._held().share()

    def broadcast_bucket(self) -> None:
        """See `HeldBucket.broadcast`."""
        self._place().broadcast([tensor for _, tensor in self._held().held()])

    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        """See `LearnerGroup.open_group`."""
        return self._place().open(urls, size, backend, timeout_s)

    def join_group(self, group: WeightGroup) -> None:
        """See `LearnerGroup.join_group`."""
        self._place().join(group)

    @ray.method(concurrency_group="leaving")
    def leave_group(self) -> None:
        """See `LearnerGroup.leave_group`. It runs in a thread of its own, beside what it breaks off."""
        if self._sending is not None:
            self._sending.leave()

    def _held(self) -> RankBucket:
        assert self._bucket is not None
        return self._bucket

    def _place(self) -> SendingPlace:
        from agentrl.learner.export.broadcaster import SendingPlace

        self._sending = self._sending or SendingPlace()
        return self._sending

    def sleep(self) -> None:
        """See `LearnerRank.sleep`."""
        self._buckets, self._bucket = iter(()), None
        self._learner.sleep()

    def wake(self) -> None:
        """See `LearnerRank.wake`."""
        self._learner.wake()

    def save(self, folder: Path) -> None:
        """See `LearnerRank.save`."""
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        """See `LearnerRank.load`."""
        self._learner.load(folder)
