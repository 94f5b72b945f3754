"""One learner rank in a process of its own. torch is imported when the actor sets itself up, not before."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig

if TYPE_CHECKING:
    from agentrl.learner.base import LearnerRank, RowLogprobs


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
        self._weights: Iterator[Any] = iter(())

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

        from agentrl.learner.device import pick_device
        from agentrl.learner.local import make_rank

        if same_machine and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self._store is None:
            self._store = TCPStore(host, port, self._ranks, is_master=False)
        device = pick_device(spec.learner.model_copy(update={"device": spec.device}), local_rank=0)
        dist.init_process_group(
            "nccl" if spec.device == "cuda" else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=timedelta(seconds=spec.learner.step_timeout_s),
        )
        self._learner = make_rank(
            spec.folder, spec.learner, spec.algo, device=device, seed=spec.seed, reference=spec.reference
        )

    def train_step(self, packed: dict[str, Any]) -> dict[str, float]:
        """See `LearnerRank.train_step`."""
        from agentrl.cluster.transfer import unpack_batch

        return self._learner.train_step(unpack_batch(packed))

    def logprobs(self, packed: dict[str, Any], policy: str) -> RowLogprobs:
        """See `LearnerRank.logprobs`."""
        from agentrl.cluster.transfer import unpack_batch

        return self._learner.logprobs(unpack_batch(packed), policy)

    def first_weights(self, bucket_bytes: int) -> Any:
        """Begin to go through the weights; see `next_weights`."""
        self._weights = iter(self._learner.weights(bucket_bytes))
        return self.next_weights()

    def next_weights(self) -> Any:
        """Return the next bucket on rank 0, True on other ranks, and None on all after the last."""
        from agentrl.cluster.transfer import pack_weights

        bucket = next(self._weights, None)
        if bucket is None:
            return None
        return pack_weights(bucket) if self._rank == 0 else True

    def save(self, folder: Path) -> None:
        """See `LearnerRank.save`."""
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        """See `LearnerRank.load`."""
        self._learner.load(folder)
