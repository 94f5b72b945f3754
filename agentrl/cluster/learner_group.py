"""The driver's side of a learner whose ranks are Ray actors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError
from typing_extensions import override

from agentrl.batch.microbatch import GlobalBatch
from agentrl.cluster.learner_actor import LearnerActor
from agentrl.cluster.placement_group import ReservedPlacement, check_cluster
from agentrl.cluster.rank_actors import GRACE_S, RankActors, T
from agentrl.cluster.ray_address import learner_device
from agentrl.cluster.ray_runtime import RayRuntime, store_bytes
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.distributed.flat_bucket import views
from agentrl.distributed.sglang_loader.agentrl_weight_delta import Changes
from agentrl.learner.base import CriticGroup, LearnerGroup, RankOptions, RowLogprobs, RowScores, WeightBucket
from agentrl.learner.export import RankBucket
from agentrl.obs.waiting import waiting


def start_learners(
    model_folder: Path,
    learner: LearnerConfig,
    algo: AlgoConfig,
    *,
    seed: int,
    run_dir: Path,
    reference: Path | None = None,
    placement: ReservedPlacement | None = None,
    runtime: RayRuntime | None = None,
) -> RayLearnerGroup:
    """Start the ranks, and Ray if none runs. Returns before the ranks have loaded the model: see `ready`.

    Args:
        model_folder: a Hugging Face folder that every rank can read.
        learner: its section; ``ranks`` actors are started.
        algo: the loss.
        seed: seed of random states.
        run_dir: a failed rank's traceback is appended to ``learner.log`` there.
        reference: the folder of the frozen reference policy of the loss; see `resolve_reference`.
        placement: contains the ranks; it has started Ray, and is closed after them. None: anywhere on the cluster.
        runtime: Ray, which is started here; it has CPUs for these ranks and those that start next. None: for these ranks.

    Raises:
        ConfigError: there is no such ``learner.device``, or the cluster is too small.
        LearnerError: Ray does not start.
    """
    device = learner_device(learner)
    options = RankOptions(model_folder.absolute(), learner, algo, torch.device(device), seed, reference)
    log = run_dir / "learner.log"
    if placement is not None:
        return RayLearnerGroup(None, options, log, placement.rank_options)
    runtime = runtime or RayRuntime(cpus=learner.ranks, store_bytes=store_bytes(model_folder))
    with waiting("start", "of Ray"):
        runtime.start()
    try:
        check_cluster([{"CPU": 1, "GPU": int(device == "cuda")}] * runtime.cpus)
        return RayLearnerGroup(runtime, options, log)
    except BaseException:
        runtime.stop()
        raise


def start_critic(
    model_folder: Path,
    learner: LearnerConfig,
    algo: AlgoConfig,
    *,
    seed: int,
    run_dir: Path,
    policy: RayLearnerGroup,
    placement: ReservedPlacement | None = None,
) -> RayCritic:
    """Start the ranks of the critic, as many as the policy's; see `start_learners`.

    Args:
        model_folder: of the critic.
        learner: as of the policy.
        algo: has the critic's optimizer and loss.
        seed: as of the policy.
        run_dir: has ``critic.log``.
        policy: has started Ray, and is closed after the critic.
        placement: contains the ranks. If they share the GPUs of the policy's ranks, each has the GPU of one of them.
    """
    options = RankOptions(
        model_folder.absolute(), learner, algo, torch.device(learner_device(learner)), seed, role="critic"
    )
    if placement is None:
        return RayCritic(None, options, run_dir / "critic.log")
    shared = policy if placement.layout.critic_needs.get("GPU") == 0 else None
    return RayCritic(None, options, run_dir / "critic.log", placement.critic_options, gpus_of=shared)


class RayLearnerGroup(RankActors, LearnerGroup):
    """Ranks of the policy."""

    _bucket_number = 0
    """Number of the current bucket, counted over all iterations."""
    _group_s = 0.0
    """Seconds that joining the broadcast group, or a broadcast in it, may take."""

    @override
    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        return self._scores(batch, lambda actor, rank_batch: actor.learner.logprobs(rank_batch, policy), "logprobs")

    @override
    def update_reference(self) -> None:
        self._call(lambda actor: actor.learner.update_reference(), "update_reference")

    @override
    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        head = self._call(lambda actor: actor.first_bucket(bucket_bytes, dtype), "first_bucket")[0]
        while head is not None:
            self._bucket_number += 1
            yield RayBucket(self, self._bucket_number, *head)
            head = self._call(LearnerActor.next_bucket, "next_bucket")[0]

    @override
    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        return self._call(lambda actor: actor.adapters(dtype, policy), "adapters")[0]

    def call_bucket(
        self, number: int, method: str, call: Callable[[RankBucket], T], ranks: int | None = None
    ) -> list[T]:
        """Call the current bucket's ``method`` on the first ``ranks`` ranks, or on all; return the results by rank."""
        assert number == self._bucket_number, "the bucket is no longer held: the next one was requested"
        limit_s = self._group_s + GRACE_S if method == "broadcast" else 0.0
        phase = f"{method} of a bucket"
        return self._call(lambda actor: call(actor.bucket), phase, ranks=ranks, at_least_s=limit_s)

    @override
    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        self._group_s = timeout_s
        addresses = list(urls)
        return self._call(
            lambda actor: actor.exporter.open_group(addresses, size, backend, timeout_s), "open_group", ranks=1
        )[0]

    @override
    def join_group(self, group: WeightGroup) -> None:
        at_least_s = self._group_s + GRACE_S
        self._call(lambda actor: actor.exporter.join_group(group), "join_group", ranks=1, at_least_s=at_least_s)

    @override
    def leave_group(self) -> None:
        """If the rank is lost, so is its place in the group."""
        if self._is_ready and self._over is None and self._actors:
            with suppress(RayError):
                ray.get(self._actors[0].leave_group.remote(), timeout=GRACE_S)

    @override
    def sleep(self) -> None:
        self._bucket_number += 1
        super().sleep()


class RayCritic(RankActors, CriticGroup):
    """Ranks of the critic."""

    @override
    def values(self, batch: GlobalBatch) -> RowScores:
        return self._scores(batch, lambda actor, rank_batch: actor.learner.values(rank_batch), "values")


class RayBucket(WeightBucket):
    """A bucket that every rank holds, on the driver."""

    def __init__(self, group: RayLearnerGroup, number: int, specs: Sequence[TensorSpec], last: bool) -> None:
        """Refer to the bucket with ``number``, counted over all iterations."""
        self._group = group
        self._number = number
        self.specs = specs
        self.last = last

    @override
    def fingerprint(self) -> int:
        return self._group.call_bucket(self._number, "fingerprint", lambda bucket: bucket.fingerprint(), ranks=1)[0]

    @override
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        # As an array, which Ray does not copy.
        [flat] = self._group.call_bucket(self._number, "tensors", lambda bucket: bucket.cpu_bytes().numpy(), ranks=1)
        with warnings.catch_warnings():  # Ray's memory is read-only, and nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return views(self.specs, torch.from_numpy(flat))

    @override
    def save(self, file: Path) -> None:
        path = file.absolute()
        self._group.call_bucket(self._number, "save", lambda bucket: bucket.save(path), ranks=1)

    @override
    def changes(self, base: str | None, version: str) -> Changes:
        function = partial(RankBucket.changes, base=base, version=version)
        return self._group.call_bucket(self._number, "changes", function, ranks=1)[0]

    @override
    def broadcast(self) -> None:
        self._group.call_bucket(self._number, "broadcast", lambda bucket: bucket.broadcast(), ranks=1)

    @override
    def ipc_handles(self) -> list[str]:
        by_rank = self._group.call_bucket(self._number, "ipc_handles", lambda bucket: bucket.ipc_handles())
        return [handle for handles in by_rank for handle in handles]
