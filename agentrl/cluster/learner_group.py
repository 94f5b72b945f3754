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
from agentrl.cluster.learner_actor import BucketHead
from agentrl.cluster.placement_group import ReservedPlacement, check_cluster
from agentrl.cluster.rank_actors import GRACE_S, RankActors, T
from agentrl.cluster.ray_address import learner_device
from agentrl.cluster.ray_runtime import RayRuntime, store_bytes
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.distributed.flat_bucket import views
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import Changes
from agentrl.learner.base import CriticGroup, LearnerGroup, RankOptions, RowLogprobs, RowScores, WeightBucket
from agentrl.learner.export import RankBucket
from agentrl.learner.streams import order_in_waves
from agentrl.obs.waiting import waiting


def start_learners(
    model_folder: Path,
    learner: LearnerConfig,
    algo: AlgoConfig,
    *,
    seed: int,
    run_dir: Path,
    reference: Path | None = None,
    trust_remote_code: bool = False,
    cluster: ReservedPlacement | RayRuntime | None = None,
) -> RayLearnerGroup:
    """Start the ranks, and Ray if none runs. Returns before the ranks have loaded the model: see `ready`.

    Args:
        model_folder: a Hugging Face folder that every rank can read.
        learner: its section; ``ranks`` actors are started.
        algo: the loss.
        seed: seed of random states.
        run_dir: a failed rank's traceback is appended to ``learner.log`` there.
        reference: the folder of the frozen reference policy of the loss; see `resolve_reference`.
        trust_remote_code: see `RankOptions`.
        cluster: a placement contains the ranks; it has started Ray, and is closed after them. A runtime is started here, and
            ranks are anywhere in it; it has CPUs for these ranks and those that start next. None: one for these ranks.

    Raises:
        ConfigError: there is no such ``learner.device``, or the cluster is too small.
        LearnerError: Ray does not start.
    """
    device = learner_device(learner)
    options = RankOptions(
        model_folder.absolute(),
        learner,
        algo,
        torch.device(device),
        seed,
        reference,
        trust_remote_code=trust_remote_code,
    )
    log = run_dir / "learner.log"
    if isinstance(cluster, ReservedPlacement):
        return RayLearnerGroup(None, options, log, cluster.rank_options, cluster.number_ranks)
    runtime = cluster or RayRuntime(cpus=learner.ranks, store_bytes=store_bytes(model_folder))
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
    trust_remote_code: bool = False,
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
        trust_remote_code: see `RankOptions`.
        placement: contains the ranks. If they share the GPUs of the policy's ranks, each has the GPU of one of them.
    """
    options = RankOptions(
        model_folder.absolute(),
        learner,
        algo,
        torch.device(learner_device(learner)),
        seed,
        role="critic",
        trust_remote_code=trust_remote_code,
    )
    if placement is None:
        return RayCritic(None, options, run_dir / "critic.log")
    shared = policy if placement.layout.critic_needs.get("GPU") == 0 else None
    # On the machine of the learner's rank with its number, which does not change when that gets the number of another there.
    number = placement.number_critics if shared is None else lambda locations: range(len(locations))
    return RayCritic(None, options, run_dir / "critic.log", placement.critic_options, number, gpus_of=shared)


class _OpenStream:
    """A stream of weights whose ranks gather buckets; see `agentrl.learner.streams`."""

    def __init__(self, ranks: tuple[int, ...], call: Callable[[int, str], ray.ObjectRef[object]]) -> None:
        """Have the first of the ``ranks`` gather a bucket, and the others do what it commands.

        Args:
            ranks: of the stream.
            call: calls a method of a rank's `LearnerActor` with them.
        """
        self.ranks = ranks
        self.followers = {rank: call(rank, "follow") for rank in ranks[1:]}
        """The calls of the other ranks, which end with the stream."""
        self.number = 0
        """Number of the current bucket; 0: there is none."""
        self.is_at_last = False
        """Whether the current bucket is the last."""
        self._call = call
        self.request()

    def request(self) -> None:
        """Have the next bucket gathered in place of the current one."""
        self.number = 0
        self.head = self._call(self.ranks[0], "next_bucket")


class RayLearnerGroup(RankActors, LearnerGroup):
    """Ranks of the policy."""

    _bucket_number = 0
    """Number of the newest bucket, counted over all iterations."""
    _streams: tuple[_OpenStream, ...] = ()
    """Streams of weights that have not ended."""
    _senders: frozenset[int] = frozenset()
    """Ranks that have opened a broadcast group."""
    _group_s = 0.0
    """Seconds that joining a broadcast group, or a broadcast in it, may take."""

    @override
    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        return self._scores(batch, lambda actor, rank_batch: actor.learner.logprobs(rank_batch, policy), "logprobs")

    @override
    def update_reference(self) -> None:
        self._call(lambda actor: actor.learner.update_reference(), "update_reference")

    @override
    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        yield from self._gather_buckets(bucket_bytes, dtype, [[tuple(range(len(self._actors)))]], by_sender=False)

    @override
    def buckets_by_sender(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        self._check_usable()
        streams = {ranks for layout in self._layouts for ranks in layout.streams or ()}
        if streams:
            yield from self._gather_buckets(bucket_bytes, dtype, order_in_waves([*streams]), by_sender=True)
        else:
            yield from self.buckets(bucket_bytes, dtype)

    def _gather_buckets(
        self, bucket_bytes: int, dtype: str | None, waves: Sequence[Sequence[tuple[int, ...]]], *, by_sender: bool
    ) -> Iterator[WeightBucket]:
        """Iterate over the buckets of streams, whose senders take turns within a wave."""
        self._call(lambda actor: actor.open_streams(bucket_bytes, dtype, by_sender=by_sender), "open_streams")
        for number, wave in enumerate(waves, 1):
            self._streams = tuple(self._open_stream(ranks) for ranks in wave)
            while self._streams:
                for stream in self._streams:
                    if (head := self._next_head(stream)) is None:
                        continue
                    stream.is_at_last = head.last
                    last = number == len(waves) and all(open_stream.is_at_last for open_stream in self._streams)
                    stream.number = self._bucket_number = self._bucket_number + 1
                    yield RayBucket(self, stream, head, last=last)
                    stream.request()

    def _open_stream(self, ranks: tuple[int, ...]) -> _OpenStream:
        def call(rank: int, method: str) -> ray.ObjectRef[object]:
            ref: ray.ObjectRef[object] = getattr(self._actors[rank], method).remote(ranks)
            return ref

        return _OpenStream(ranks, call)

    def _next_head(self, stream: _OpenStream) -> BucketHead | None:
        """Wait for the next bucket of a stream; return None when it has ended."""
        head: BucketHead | None = None
        phase, leader, followers = "gathering of a bucket", stream.ranks[:1], stream.ranks[1:]
        try:
            [head] = self._results([stream.head], phase, ranks=leader, watched=stream.followers)
            if head is None:
                self._results([*stream.followers.values()], phase, ranks=followers)
        finally:
            if head is None:  # also if its ranks have failed: none waits for a command
                self._streams = tuple(open_stream for open_stream in self._streams if open_stream is not stream)
        return head

    @override
    def _end_streams(self) -> None:
        streams, self._streams = self._streams, ()
        if streams and self._over is None:
            stops = [self._actors[stream.ranks[0]].stop_stream.remote(stream.ranks) for stream in streams]
            followers = {rank: ref for stream in streams for rank, ref in stream.followers.items()}
            refs, ranks = [*stops, *followers.values()], [*(stream.ranks[0] for stream in streams), *followers]
            self._results(refs, "end of the gathering", ranks=ranks)

    @override
    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        return self._call(lambda actor: actor.adapters(dtype, policy), "adapters")[0]

    def call_bucket(self, stream: _OpenStream, number: int, method: str, call: Callable[[RankBucket], T]) -> T:
        """Call the current bucket's ``method`` on its sender."""
        assert number == stream.number, "the bucket is no longer held: the next one was requested"
        ranks, at_least_s = stream.ranks, self._group_s + GRACE_S if method == "broadcast" else 0.0
        phase = f"{method} of a bucket"
        [result] = self._call(lambda actor: call(actor.bucket(ranks)), phase, ranks=ranks[:1], at_least_s=at_least_s)
        return result

    def ipc_handles(self, stream: _OpenStream, number: int) -> list[str]:
        """Return the handles of the current bucket by rank."""
        assert number == stream.number, "the bucket is no longer held: the next one was requested"
        ref = self._actors[stream.ranks[0]].ipc_handles.remote(stream.ranks)
        [handles] = self._results([ref], "ipc_handles of a bucket", ranks=stream.ranks[:1])
        return list(handles)

    @override
    def open_group(
        self, urls: Sequence[str], size: int, backend: str, timeout_s: float, sender: int = 0
    ) -> WeightGroup:
        self._group_s = timeout_s
        self._senders |= {sender}
        addresses = list(urls)
        [group] = self._call(
            lambda actor: actor.exporter.open_group(addresses, size, backend, timeout_s), "open_group", ranks=[sender]
        )
        return group

    @override
    def join_group(self, group: WeightGroup, sender: int = 0) -> None:
        at_least_s = self._group_s + GRACE_S
        self._call(lambda actor: actor.exporter.join_group(group), "join_group", ranks=[sender], at_least_s=at_least_s)

    @override
    def leave_group(self) -> None:
        """If a rank is lost, so is its place in its group."""
        senders, self._senders = self._senders, frozenset()
        if self._is_ready and self._over is None and self._actors:
            refs = [self._actors[sender].leave_group.remote() for sender in senders]
            for ref in refs:
                with suppress(RayError):
                    ray.get(ref, timeout=GRACE_S)

    @override
    def sleep(self) -> None:
        super().sleep()


class RayCritic(RankActors, CriticGroup):
    """Ranks of the critic."""

    @override
    def values(self, batch: GlobalBatch) -> RowScores:
        return self._scores(batch, lambda actor, rank_batch: actor.learner.values(rank_batch), "values")


class RayBucket(WeightBucket):
    """A bucket that every rank holds, on the driver."""

    def __init__(self, group: RayLearnerGroup, stream: _OpenStream, head: BucketHead, *, last: bool) -> None:
        """Refer to the current bucket of a stream."""
        self._group = group
        self._stream = stream
        self._number = stream.number
        self._fingerprint = head.fingerprint
        self.specs: Sequence[TensorSpec] = head.specs
        self.last = last
        self.sender = stream.ranks[0]

    def _call(self, method: str, call: Callable[[RankBucket], T]) -> T:
        return self._group.call_bucket(self._stream, self._number, method, call)

    @override
    def fingerprint(self) -> int:
        return self._fingerprint

    @override
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        # As an array, which Ray does not copy.
        flat = self._call("tensors", lambda bucket: bucket.cpu_bytes().numpy())
        with warnings.catch_warnings():  # Ray's memory is read-only, and nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return views(self.specs, torch.from_numpy(flat))

    @override
    def save(self, file: Path) -> None:
        path = file.absolute()
        self._call("save", lambda bucket: bucket.save(path))

    @override
    def changes(self, base: str | None, version: str) -> Changes:
        return self._call("changes", partial(RankBucket.changes, base=base, version=version))

    @override
    def broadcast(self) -> None:
        self._call("broadcast", lambda bucket: bucket.broadcast())

    @override
    def ipc_handles(self) -> list[str]:
        return self._group.ipc_handles(self._stream, self._number)
