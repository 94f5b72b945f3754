"""The driver's side of a learner whose ranks are Ray actors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError

from agentrl.batch.microbatch import GlobalBatch
from agentrl.cluster.learner_actor import LearnerActor, RankSpec
from agentrl.cluster.placement_group import ReservedPlacement, check_cluster
from agentrl.cluster.rank_actors import GRACE_S, RankActors, T
from agentrl.cluster.ray_address import learner_device
from agentrl.cluster.ray_runtime import RayRuntime, store_bytes
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.distributed.flat_bucket import views
from agentrl.distributed.sglang_loader.agentrl_weight_delta import Changes
from agentrl.learner.base import RowLogprobs, RowScores, WeightBucket
from agentrl.learner.export.bucket import RankBucket
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
    critic_ranks: int = 0,
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
        critic_ranks: ranks of a critic that `start_critic` starts next; a Ray that is started here has room for them.

    Raises:
        ConfigError: there is no such ``learner.device``, or the cluster is too small.
        LearnerError: Ray does not start.

    """
    device = learner_device(learner)
    spec = RankSpec(model_folder.absolute(), learner, algo, seed, device, reference)
    log = run_dir / "learner.log"
    if placement is not None:
        return RayLearnerGroup(None, spec, log, placement.rank_options)
    ranks = learner.ranks + critic_ranks
    runtime = RayRuntime(cpus=ranks, store_bytes=store_bytes(model_folder))
    with waiting("start", "of Ray"):
        runtime.start()
    try:
        check_cluster([{"CPU": 1, "GPU": int(device == "cuda")}] * ranks)
        return RayLearnerGroup(runtime, spec, log)
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
    spec = RankSpec(model_folder.absolute(), learner, algo, seed, learner_device(learner), role="critic")
    if placement is None:
        return RayCritic(None, spec, run_dir / "critic.log")
    shared = policy if placement.layout.critic_needs.get("GPU") == 0 else None
    return RayCritic(None, spec, run_dir / "critic.log", placement.critic_options, gpus_of=shared)


class RayLearnerGroup(RankActors):
    """Implements `agentrl.learner.base.LearnerGroup`."""

    _bucket_number = 0
    """Number of the current bucket, counted over all iterations."""
    _group_s = 0.0
    """Seconds that joining the broadcast group, or a broadcast in it, may take."""

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return log-probabilities by row; see `LearnerGroup.logprobs`."""
        return self._scores(batch, lambda rank, share: rank.logprobs(share, policy), "logprobs")

    def update_reference(self) -> None:
        """Copy the policy into the reference; see `LearnerGroup.update_reference`."""
        self._call(lambda actor: actor.learner.update_reference(), "update_reference")

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over the weights; see `LearnerGroup.buckets`."""
        head = self._call(lambda actor: actor.first_bucket(bucket_bytes, dtype), "first_bucket")[0]
        while head is not None:
            self._bucket_number += 1
            yield RayBucket(self, self._bucket_number, *head)
            head = self._call(LearnerActor.next_bucket, "next_bucket")[0]

    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        """Return the LoRA adapters; see `LearnerGroup.adapters`."""
        return self._call(lambda actor: actor.adapters(dtype, policy), "adapters")[0]

    def call_bucket(
        self, number: int, method: str, call: Callable[[RankBucket], T], ranks: int | None = None
    ) -> list[T]:
        """Call the current bucket's ``method`` on the first ``ranks`` ranks, or on all; return the results by rank."""
        assert number == self._bucket_number, "the bucket is no longer held: the next one was requested"
        limit_s = self._group_s + GRACE_S if method == "broadcast" else 0.0
        phase = f"{method} of a bucket"
        return self._call(lambda actor: call(actor.bucket), phase, ranks=ranks, at_least_s=limit_s)

    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        """Open a group's store; see `LearnerGroup.open_group`."""
        self._group_s = timeout_s
        addresses = list(urls)
        return self._call(
            lambda actor: actor.exporter.open_group(addresses, size, backend, timeout_s), "open_group", ranks=1
        )[0]

    def join_group(self, group: WeightGroup) -> None:
        """Join the group; see `LearnerGroup.join_group`."""
        at_least_s = self._group_s + GRACE_S
        self._call(lambda actor: actor.exporter.join_group(group), "join_group", ranks=1, at_least_s=at_least_s)

    def leave_group(self) -> None:
        """Leave the group; see `LearnerGroup.leave_group`. If the rank is lost, so is its place in the group."""
        if self._is_ready and self._over is None and self._actors:
            with suppress(RayError):
                ray.get(self._actors[0].leave_group.remote(), timeout=GRACE_S)

    def sleep(self) -> None:
        """Release the device's memory, including that of a bucket; see `LearnerGroup.sleep`."""
        self._bucket_number += 1
        super().sleep()


class RayCritic(RankActors):
    """Implements `agentrl.learner.base.CriticGroup`."""

    def values(self, batch: GlobalBatch) -> RowScores:
        """Return values by row; see `CriticGroup.values`."""
        return self._scores(batch, lambda rank, share: rank.values(share), "values")


class RayBucket:
    """Implements `agentrl.learner.base.WeightBucket` on the driver: every rank holds the bucket."""

    def __init__(self, group: RayLearnerGroup, number: int, specs: Sequence[TensorSpec], last: bool) -> None:
        """Refer to the bucket with ``number``, counted over all iterations."""
        self._group = group
        self._number = number
        self.specs = specs
        self.last = last

    def fingerprint(self) -> int:
        """Return 64 bits of the weights on rank 0; see `WeightBucket.fingerprint`."""
        return self._group.call_bucket(self._number, "fingerprint", lambda bucket: bucket.fingerprint(), ranks=1)[0]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU; see `WeightBucket.tensors`."""
        # As an array, which Ray does not copy.
        [flat] = self._group.call_bucket(self._number, "tensors", lambda bucket: bucket.cpu_bytes().numpy(), ranks=1)
        with warnings.catch_warnings():  # Ray's memory is read-only, and nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return views(self.specs, torch.from_numpy(flat))

    def save(self, file: Path) -> None:
        """Write the weights from rank 0; see `WeightBucket.save`."""
        path = file.absolute()
        self._group.call_bucket(self._number, "save", lambda bucket: bucket.save(path), ranks=1)

    def changes(self, base: str | None, held: str) -> Changes:
        """Return the changes on rank 0; see `WeightBucket.changes`."""
        return self._group.call_bucket(self._number, "changes", lambda bucket: bucket.changes(base, held), ranks=1)[0]

    def broadcast(self) -> None:
        """Send the weights from rank 0; see `WeightBucket.broadcast`."""
        self._group.call_bucket(self._number, "broadcast", lambda bucket: bucket.broadcast(), ranks=1)

    def share(self) -> list[str]:
        """Return the handles by rank; see `WeightBucket.share`."""
        shares = self._group.call_bucket(self._number, "share", lambda bucket: bucket.share())
        return [handle for handles in shares for handle in handles]
