"""The driver's side of a learner whose ranks are Ray actors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.provenance import admit
from agentrl.cluster.learner_actor import LearnerActor, RankSpec
from agentrl.cluster.placement_group import ActorLocation, ReservedPlacement, actor_location, check_cluster
from agentrl.cluster.ray_address import learner_device
from agentrl.cluster.ray_runtime import RayRuntime, store_bytes
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import AgentrlError, LearnerError
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.learner.base import RowLogprobs, WeightBucket
from agentrl.learner.export.bucket import views
from agentrl.obs.waiting import waiting

GRACE_S = 5.0
"""Seconds for the other ranks to fail with the same cause after one failed; ranks still running then wait for it."""


def start_learners(
    model_folder: Path,
    learner: LearnerConfig,
    algo: AlgoConfig,
    *,
    seed: int,
    run_dir: Path,
    reference: Path | None = None,
    placement: ReservedPlacement | None = None,
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

    Raises:
        ConfigError: there is no such ``learner.device``.
        LearnerError: Ray does not start.

    """
    device = learner_device(learner)
    spec = RankSpec(model_folder, learner, algo, seed, device, reference)
    log = run_dir / "learner.log"
    if placement is not None:
        return RayLearnerGroup(None, spec, log, placement.rank_options)
    runtime = RayRuntime(cpus=learner.ranks, store_bytes=store_bytes(model_folder))
    with waiting("start", "of Ray"):
        runtime.start()
    try:
        check_cluster([{"CPU": 1, "GPU": int(device == "cuda")}] * learner.ranks)
        return RayLearnerGroup(runtime, spec, log)
    except BaseException:
        runtime.stop()
        raise


class RayLearnerGroup:
    """Implements `agentrl.learner.base.LearnerGroup`. If a rank is lost or hangs, all ranks are ended."""

    def __init__(
        self,
        runtime: RayRuntime | None,
        spec: RankSpec,
        log: Path,
        rank_options: Callable[[int], Mapping[str, Any]] = lambda rank: {},
    ) -> None:
        """Start the ranks.

        Args:
            runtime: stopped by `close`; None leaves Ray running.
            spec: of the ranks.
            log: gets the ranks' tracebacks.
            rank_options: Ray actor options by rank, such as a scheduling strategy.

        """
        self._runtime = runtime
        self._spec = spec
        self._log = log
        self._over: str | None = None
        self._is_ready = False
        self._bucket_number = 0
        """Number of the current bucket, counted over all iterations."""
        self._group_s = 0.0
        """Seconds that joining the broadcast group, or a broadcast in it, may take."""
        ranks = spec.learner.ranks
        options: dict[str, Any] = {"num_gpus": int(spec.device == "cuda"), "concurrency_groups": {"leaving": 1}}
        actor: Any = ray.remote(num_cpus=1, max_restarts=0, **options)(LearnerActor)
        self._actors: list[Any] = [actor.options(**rank_options(rank)).remote(rank, ranks) for rank in range(ranks)]
        self._locations = [actor.__ray_call__.remote(actor_location) for actor in self._actors]
        # Imports take seconds: the actors start them now, while the caller starts engines.
        self._nodes = [actor.node.remote() for actor in self._actors]

    def actor_locations(self) -> list[ActorLocation]:
        """Wait until every rank has its process, and return the locations by rank.

        Raises:
            LearnerError: one could not start, or not within ``learner.start_timeout_s``.

        """
        limit = time.monotonic() + self._spec.learner.start_timeout_s
        return self._gather(self._locations, "start", limit, "learner.start_timeout_s")

    def ready(self) -> None:
        """Wait until every rank has loaded the model. Other calls include this; a second call returns at once.

        Raises:
            ModelError: the model cannot be loaded.
            LearnerError: a rank failed, or took longer than ``learner.start_timeout_s``.

        """
        if self._is_ready:
            return
        limit = time.monotonic() + self._spec.learner.start_timeout_s
        nodes = self._gather(self._nodes, "start", limit, "learner.start_timeout_s")
        same = len(set(nodes)) == 1
        host = LOOPBACK if same else nodes[0]
        store = [self._actors[0].open_store.remote(host)]
        [port] = self._gather(store, "start", limit, "learner.start_timeout_s")
        refs = [actor.set_up.remote(self._spec, host, port, same) for actor in self._actors]
        self._gather(refs, "loading the model", limit, "learner.start_timeout_s")
        self._is_ready = True

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step; see `LearnerGroup.train_step`. The ranks stay usable after a refused batch."""
        batch, metrics = admit(batch)
        sizes, ranks = [len(share) for share in batch.micro], len(self._actors)
        assert sizes == sizes[:1] * ranks, (
            f"a batch with shares of {sizes} micro-batches came to a learner of {ranks} ranks"
        )
        self._check_usable()
        # Ray copies CPU tensors: 0.06 s for a batch of 512,000 tokens (22 MB), 0.04 s more than as NumPy arrays.
        refs = [
            actor.call_rank.remote("train_step", replace(batch, micro=(share,), metrics={}))
            for actor, share in zip(self._actors, batch.micro, strict=True)
        ]
        reduced: dict[str, float] = self._results(refs, "train_step")[0]
        return metrics | reduced

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return log-probabilities by row; see `LearnerGroup.logprobs`."""
        shares = [(replace(batch, micro=(share,), metrics={}), policy) for share in batch.micro]
        assert len(shares) == len(self._actors), (
            f"a batch for {len(shares)} ranks came to a learner of {len(self._actors)}"
        )
        found: RowLogprobs = {}
        for share in self._call_ranks("logprobs", shares):
            found |= share
        return found

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over the weights; see `LearnerGroup.buckets`."""
        head = self._call("first_bucket", [(bucket_bytes, dtype)] * len(self._actors))[0]
        while head is not None:
            self._bucket_number += 1
            yield RayBucket(self, self._bucket_number, *head)
            head = self._call("next_bucket")[0]

    def call_bucket(self, number: int, method: str, *args: Any, ranks: int | None = None) -> list[Any]:
        """Call a method of the current bucket on the first ``ranks`` ranks, or on all; return the results by rank."""
        assert number == self._bucket_number, "the bucket is no longer held: the next one was requested"
        limit_s = self._group_s + GRACE_S if method == "broadcast" else 0.0
        arguments = [(method, *args)] * (ranks or len(self._actors))
        return self._call("call_bucket", arguments, phase=f"{method} of a bucket", at_least_s=limit_s)

    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        """Open a group's store; see `LearnerGroup.open_group`."""
        self._group_s = timeout_s
        group: WeightGroup = self._call("open_group", [(list(urls), size, backend, timeout_s)])[0]
        return group

    def join_group(self, group: WeightGroup) -> None:
        """Join the group; see `LearnerGroup.join_group`."""
        self._call("join_group", [(group,)], at_least_s=self._group_s + GRACE_S)

    def leave_group(self) -> None:
        """Leave the group; see `LearnerGroup.leave_group`. If the rank is lost, so is its place in the group."""
        if self._is_ready and self._over is None and self._actors:
            with suppress(RayError):
                ray.get(self._actors[0].leave_group.remote(), timeout=GRACE_S)

    def sleep(self) -> None:
        """Release the device's memory, including that of a bucket; see `LearnerGroup.sleep`."""
        self._bucket_number += 1
        self._call_ranks("sleep")

    def wake(self) -> None:
        """Restore the device's memory; see `LearnerGroup.wake`."""
        self._call_ranks("wake")

    def save(self, folder: Path) -> None:
        """Write the state; see `LearnerGroup.save`."""
        self._call_ranks("save", [(folder.absolute(),)] * len(self._actors))

    def load(self, folder: Path) -> None:
        """Read the state; see `LearnerGroup.load`."""
        self._call_ranks("load", [(folder.absolute(),)] * len(self._actors))

    def close(self) -> None:
        """End the ranks, and Ray if it was started for them. Idempotent."""
        if self._actors:
            self._end("it was closed")
            self._actors = []
            if self._runtime is not None:
                self._runtime.stop()

    def _call_ranks(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of every `LearnerRank`, with ``arguments`` by rank; return the results by rank."""
        arguments = arguments or [()] * len(self._actors)
        return self._call("call_rank", [(method, *args) for args in arguments], phase=method)

    def _call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]] | None = None,
        *,
        phase: str | None = None,
        at_least_s: float = 0.0,
    ) -> list[Any]:
        """Call a method of all actors, or of the first ones with ``arguments`` by rank; return the results by rank.

        Messages call it ``phase``. The time limit is ``learner.step_timeout_s``, and ``at_least_s``.
        """
        self._check_usable()
        arguments = arguments or [()] * len(self._actors)
        refs = [getattr(actor, method).remote(*args) for actor, args in zip(self._actors, arguments, strict=False)]
        return self._results(refs, phase or method, at_least_s)

    def _results(self, refs: Sequence[Any], phase: str, at_least_s: float = 0.0) -> list[Any]:
        """Wait for calls within ``learner.step_timeout_s``, or ``at_least_s``; return the results by rank."""
        limit = time.monotonic() + max(self._spec.learner.step_timeout_s, at_least_s)
        return self._gather(refs, phase, limit, "learner.step_timeout_s")

    def _check_usable(self) -> None:
        self.ready()
        self._check_over()

    def _check_over(self) -> None:
        if self._over is not None:
            raise LearnerError(f"the learner has ended: {self._over}")

    def _gather(self, refs: Sequence[Any], phase: str, limit: float, key: str) -> list[Any]:
        """Return all results, or raise the first failure; then ranks that still wait for the failed one are ended."""
        self._check_over()
        left = list(refs)

        def late() -> list[int]:
            return sorted(refs.index(ref) for ref in left)

        with waiting("learner", lambda: f"rank {' and '.join(map(str, late()))} of {len(self._actors)}", phase):
            while left:
                done, left = ray.wait(left, timeout=max(0.0, limit - time.monotonic()))
                if not done:
                    self._end(f"{phase} took longer than {key}")
                    raise LearnerError(f"{phase}: rank {late()} gave no answer in time; {key} can be raised")
                try:
                    ray.get(done)
                except RayError as error:
                    raise self._failure(error, refs.index(done[0]), left, phase) from None
            return list(ray.get(list(refs)))

    def _failure(self, error: RayError, rank: int, waiting: list[Any], phase: str) -> AgentrlError:
        """Return the error to raise for a failed rank, and end the other ranks if they cannot go on without it."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        text = str(cause).strip().splitlines()
        summary = f"{type(cause).__name__}: {text[0] if text else 'no message'}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"rank {rank}, {phase}\n{error}\n")
        done, late = ray.wait(waiting, num_returns=len(waiting), timeout=GRACE_S) if waiting else ([], [])
        # A rank may notice that another has died before Ray does.
        if isinstance(error, RayActorError) or late or any(_lost(ref) for ref in done):
            self._end(f"rank {rank} failed in {phase}: {summary}")
        if isinstance(cause, AgentrlError):
            return cause
        return LearnerError(f"rank {rank} of {len(self._actors)} failed in {phase}: {summary} (see {self._log})")

    def _end(self, why: str) -> None:
        """Kill all ranks; the errors of later calls name the reason ``why``."""
        self._over = self._over or why
        for actor in self._actors:
            ray.kill(actor)


class RayBucket:
    """Implements `agentrl.learner.base.WeightBucket` on the driver: every rank holds the bucket."""

    def __init__(self, group: RayLearnerGroup, number: int, specs: Sequence[TensorSpec], last: bool) -> None:
        """Refer to the bucket with ``number``, counted over all iterations."""
        self._group = group
        self._number = number
        self.specs = specs
        self.last = last

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU; see `WeightBucket.tensors`."""
        [flat] = self._group.call_bucket(self._number, "cpu_bytes", ranks=1)
        with warnings.catch_warnings():  # Ray's memory is read-only, and nothing writes to it
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return views(self.specs, torch.from_numpy(flat))

    def save(self, file: Path) -> None:
        """Write the weights from rank 0; see `WeightBucket.save`."""
        self._group.call_bucket(self._number, "save", file.absolute(), ranks=1)

    def broadcast(self) -> None:
        """Send the weights from rank 0; see `WeightBucket.broadcast`."""
        self._group.call_bucket(self._number, "broadcast", ranks=1)

    def share(self) -> list[str]:
        """Return the handles by rank; see `WeightBucket.share`."""
        return [handle for handles in self._group.call_bucket(self._number, "share") for handle in handles]


def _lost(ref: Any) -> bool:
    """Return whether a finished call failed because its rank died."""
    try:
        ray.get(ref)
    except RayActorError:
        return True
    except RayError:
        return False
    return False
