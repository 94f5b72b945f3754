"""The driver's side of ranks that are Ray actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from typing_extensions import override

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.provenance import check_provenance
from agentrl.cluster.learner_actor import LearnerActor, RankLayout
from agentrl.cluster.placement_group import ActorLocation, actor_location, order_by_gpu
from agentrl.cluster.ray_runtime import LOOK_S, RayRuntime, check_ray, kill_actor, raylet_ended
from agentrl.core.atomic_files import DISK_ERRORS, append
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import AgentrlError, LearnerError
from agentrl.learner.base import RankGroup, RankOptions, RowScores
from agentrl.obs.waiting import waiting

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds for the other ranks to fail with the same cause after one failed; ranks still running then wait for it."""


class RankActors(RankGroup):
    """What a learner and a critic have in common. If a rank is lost or hangs, all ranks are ended."""

    def __init__(
        self,
        runtime: RayRuntime | None,
        options: RankOptions,
        log: Path,
        rank_options: Callable[[int], Mapping[str, Any]] = lambda rank: {},
        number: Callable[[Sequence[ActorLocation]], Sequence[int]] = order_by_gpu,
        gpus_of: RankActors | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            runtime: stopped by `close`; None leaves Ray running.
            options: of the ranks; ``device`` is ``cpu`` or ``cuda``.
            log: gets the ranks' tracebacks.
            rank_options: Ray actor options by rank, such as a scheduling strategy.
            number: returns, of actors by location, which of them is each rank: see `ReservedPlacement.number_ranks`.
            gpus_of: other ranks, on the same machines, whose GPUs these use, rank by rank.
        """
        self._runtime = runtime
        self._options = options
        self._gpus_of = gpus_of
        self._log = log
        self._name = "critic" if options.role == "critic" else "learner"
        self._over: str | None = None
        self._is_ready = False
        self._number = number
        self._numbering = threading.Lock()
        self._numbered: list[ActorLocation] = []
        """Locations by rank; empty until the ranks have their numbers."""
        self._layouts: list[RankLayout] = []
        """By rank; empty until they are ready."""
        ranks = options.config.ranks
        actor_options: dict[str, Any] = {
            "num_gpus": int(options.device.type == "cuda"),
            "concurrency_groups": {"leaving": 1, "saving": 1, "watching": 1},
        }
        actor: Any = ray.remote(num_cpus=1, max_restarts=0, **actor_options)(LearnerActor)
        self._actors: list[Any] = [actor.options(**rank_options(rank)).remote(ranks) for rank in range(ranks)]
        self._ends = [actor.wait_for_end.remote() for actor in self._actors]
        """Calls that fail when their rank is lost."""
        self._locations = [actor.__ray_call__.remote(actor_location) for actor in self._actors]
        # Imports take seconds: the actors start them now, while the caller starts engines.
        self._nodes = [actor.node.remote(options.config) for actor in self._actors]

    def actor_locations(self) -> list[ActorLocation]:
        """Wait until every rank has its process, and return the locations by rank.

        Until then actors are numbered as they were started. The first call numbers them by machine and GPU.

        Raises:
            LearnerError: one could not start, or not within ``learner.start_timeout_s``.
        """
        limit = time.monotonic() + self._options.config.start_timeout_s
        with self._numbering:
            if not self._numbered:
                locations = self._gather(self._locations, "start", limit, "learner.start_timeout_s")
                order = self._number(locations)
                for by_rank in (self._actors, self._ends, self._nodes):
                    by_rank[:] = [by_rank[number] for number in order]
                self._numbered = [locations[number] for number in order]
            return self._numbered

    def ready(self) -> None:
        """Wait until every rank has loaded the model. Other calls include this; a second call returns at once.

        Raises:
            ModelError: the model cannot be loaded.
            LearnerError: a rank failed, or took longer than ``learner.start_timeout_s``.
        """
        if self._is_ready:
            return
        self.actor_locations()
        limit = time.monotonic() + self._options.config.start_timeout_s
        nodes = self._gather(self._nodes, "importing its modules", limit, "learner.start_timeout_s")
        same = len(set(nodes)) == 1
        host = LOOPBACK if same else nodes[0]
        store = [self._actors[0].open_store.remote(host)]
        [port] = self._gather(store, "opening the ranks' meeting point", limit, "learner.start_timeout_s")
        gpus = (
            [location.gpus for location in self._gpus_of.actor_locations()]
            if self._gpus_of is not None
            else [()] * len(nodes)
        )
        refs = [
            actor.set_up.remote(rank, self._options, host, port, same, shared)
            for rank, (actor, shared) in enumerate(zip(self._actors, gpus, strict=True))
        ]
        self._layouts = self._gather(refs, "loading the model", limit, "learner.start_timeout_s")
        self._is_ready = True

    def check(self) -> None:
        """Raise if a rank or a process of Ray was lost. Returns at once.

        Raises:
            LearnerError: after the loss of a rank all ranks are ended; after that of Ray's process they still work.
        """
        self._check_over()
        lost, _ = ray.wait(self._ends, timeout=0)
        if lost:
            rank = self._ends.index(lost[0])
            self.end(f"rank {rank} was lost")
            raise LearnerError(
                f"rank {rank} of {len(self._actors)} of the {self._name} was lost: its process has ended"
            )
        check_ray()

    @cached_property
    @override
    def shares_prefixes(self) -> bool:
        return self._call(lambda actor: actor.learner.shares_prefixes, "loading the model")[0]

    @override
    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """The ranks stay usable after a refused batch."""
        check_provenance(batch)
        parts = self._put_parts(batch)
        return self._call_with_parts(
            parts, lambda actor, rank_batch: actor.learner.train_step(rank_batch), "train_step"
        )[0]

    @override
    def sleep(self) -> None:
        self._call(LearnerActor.sleep, "sleep")

    @override
    def wake(self) -> None:
        self._call(lambda actor: actor.learner.wake(), "wake")

    @override
    def save(self, folder: Path) -> None:
        path = folder.absolute()
        self._call(lambda actor: actor.learner.save(path), "save")

    @override
    def finish_save(self) -> None:
        self._check_usable()
        self._results([actor.finish_save.remote() for actor in self._actors], "save")

    @override
    def load(self, folder: Path) -> None:
        path = folder.absolute()
        self._call(lambda actor: actor.learner.load(path), "load")

    @override
    def close(self) -> None:
        """End the ranks, and Ray if it was started for them. Idempotent."""
        if self._actors:
            self.end("it was closed")
            self._actors = []
            if self._runtime is not None:
                self._runtime.stop()

    def _scores(
        self, batch: GlobalBatch, call: Callable[[LearnerActor, GlobalBatch], RowScores], phase: str
    ) -> RowScores:
        """Return the scores of all rows."""
        results = self._call_with_parts(self._put_parts(batch), call, phase)
        return {key: scores_T for scores in results for key, scores_T in scores.items()}

    def _put_parts(self, batch: GlobalBatch) -> list[ray.ObjectRef[GlobalBatch]]:
        """Put the part of a batch of each data-parallel rank into Ray's object store; return the references."""
        self._check_usable()
        self._end_streams()
        sizes = [len(micro_batches) for micro_batches in batch.micro]
        groups = max(layout.data_parallel_rank for layout in self._layouts) + 1
        assert sizes == sizes[:1] * groups, (
            f"a batch of {sizes} micro-batches by data-parallel rank came to a {self._name} with {groups} of them"
        )
        # Ray copies CPU tensors: 0.06 s for a batch of 512,000 tokens (22 MB), 0.04 s more than as NumPy arrays.
        return [ray.put(replace(batch, micro=(micro_batches,), metrics={})) for micro_batches in batch.micro]

    def _call_with_parts(
        self, parts: Sequence[ray.ObjectRef[GlobalBatch]], call: Callable[[LearnerActor, GlobalBatch], T], phase: str
    ) -> list[T]:
        """Call every rank with the part of a batch that it computes; return the results by rank."""
        refs = [
            actor.__ray_call__.remote(call, parts[layout.data_parallel_rank])
            for actor, layout in zip(self._actors, self._layouts, strict=True)
        ]
        return self._results(refs, phase)

    def _call(
        self,
        function: Callable[[LearnerActor], T],
        phase: str,
        *,
        ranks: Sequence[int] | None = None,
        at_least_s: float = 0.0,
    ) -> list[T]:
        """Call a function in the processes of some ``ranks``, or of all; return the results in their order.

        Messages call it ``phase``. The time limit is ``learner.step_timeout_s``, and ``at_least_s``.
        """
        self._check_usable()
        if ranks is None:
            self._end_streams()
        ranks = range(len(self._actors)) if ranks is None else ranks
        refs = [self._actors[rank].__ray_call__.remote(function) for rank in ranks]
        return self._results(refs, phase, at_least_s, ranks)

    def _end_streams(self) -> None:
        """Let no rank wait for the next bucket of weights, so that all take other calls."""

    def _results(
        self,
        refs: Sequence[Any],
        phase: str,
        at_least_s: float = 0.0,
        ranks: Sequence[int] | None = None,
        watched: Mapping[int, ray.ObjectRef[object]] = MappingProxyType({}),
    ) -> list[Any]:
        """Wait for calls within ``learner.step_timeout_s``, or ``at_least_s``; return the results in their order.

        Args:
            refs: of the calls.
            phase: names them in messages.
            at_least_s: seconds that they may take in any case.
            ranks: which were called; None are all.
            watched: by rank, calls that are not waited for, but whose failure is that of ``refs``.
        """
        limit = time.monotonic() + max(self._options.config.step_timeout_s, at_least_s)
        return self._gather(refs, phase, limit, "learner.step_timeout_s", ranks, watched)

    def _check_usable(self) -> None:
        self.ready()
        self._check_over()

    def _check_over(self) -> None:
        if self._over is None and raylet_ended():
            self._over = "Ray's raylet has ended, and with it all ranks"
        if self._over is not None:
            raise LearnerError(f"the {self._name} has ended: {self._over}")

    def _gather(
        self,
        refs: Sequence[Any],
        phase: str,
        limit: float,
        key: str,
        ranks: Sequence[int] | None = None,
        watched: Mapping[int, ray.ObjectRef[object]] = MappingProxyType({}),
    ) -> list[Any]:
        """Return all results, or raise the first failure; then ranks that still wait for the failed one are ended."""
        self._check_over()
        pending, followers = list(refs), list(watched.values())
        rank_by_ref = dict(zip(refs, ranks or range(len(refs)), strict=True))
        rank_by_ref |= {ref: rank for rank, ref in watched.items()}

        def late() -> list[int]:
            return sorted(rank_by_ref[ref] for ref in pending)

        with waiting(self._name, lambda: f"rank {' and '.join(map(str, late()))} of {len(self._actors)}", phase):
            while pending:
                rest_s = max(0.0, limit - time.monotonic())
                wait_s = rest_s if self._is_ready else min(rest_s, LOOK_S)
                done, _ = ray.wait([*pending, *followers], timeout=wait_s)
                pending = [ref for ref in pending if ref not in done]
                followers = [ref for ref in followers if ref not in done]
                if not done and not self._is_ready:
                    check_ray()  # without its processes no actor starts
                if not done and time.monotonic() < limit:
                    continue
                if not done:
                    self.end(f"{phase} took longer than {key}")
                    raise LearnerError(
                        f"{phase}: rank {late()} of the {self._name} gave no answer in time; {key} can be raised"
                    )
                try:
                    ray.get(done)
                except RayError as error:
                    raise self._failure(error, rank_by_ref[done[0]], pending + followers, phase) from None
            return list(ray.get(list(refs)))

    def _failure(self, error: RayError, rank: int, waiting: list[Any], phase: str) -> AgentrlError | OSError:
        """Return the error to raise for a failed rank, and end the other ranks if they cannot continue without it."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        summary = _summary(cause)
        with suppress(OSError):  # of a full disk, which may be the cause
            self._log.parent.mkdir(parents=True, exist_ok=True)
            append(self._log, f"rank {rank}, {phase}\n{error}\n".encode())
        done, late = ray.wait(waiting, num_returns=len(waiting), timeout=GRACE_S) if waiting else ([], [])
        # A rank may notice that another has died before Ray does.
        if isinstance(error, RayActorError) or late or any(_lost(ref) for ref in done):
            self.end(f"rank {rank} failed in {phase}: {summary}")
        if isinstance(cause, AgentrlError) or (isinstance(cause, OSError) and cause.errno in DISK_ERRORS):
            return cause
        return LearnerError(f"rank {rank} of {len(self._actors)} failed in {phase}: {summary} (see {self._log})")

    def end(self, why: str) -> None:
        """Kill all ranks, also while another thread waits for them; the errors of its call and of later ones name ``why``."""
        self._over = self._over or why
        for actor in self._actors:
            kill_actor(actor)


def _summary(cause: BaseException) -> str:
    """Return the type and the first line of an error; of an error that could not be pickled, those in its traceback."""
    lines = str(cause).strip().splitlines()
    if type(cause) is RayError:
        frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
        errors = [line for line in lines[frames[-1] :] if not line.startswith(" ")] if frames else lines
        return errors[0]
    return f"{type(cause).__name__}: {lines[0] if lines else 'no message'}"


def _lost(ref: Any) -> bool:
    """Return whether a finished call failed because its rank died."""
    try:
        ray.get(ref)
    except RayError as error:
        return isinstance(error, RayActorError)
    return False
