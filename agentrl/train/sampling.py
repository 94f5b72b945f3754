"""Where the rollouts of a step come from: sampled with the present policy here, or from disk (`agentrl.train.replay`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.core.types import Rollout
from agentrl.episode.runner import EpisodeRunner
from agentrl.evaluation.evaluate import evaluate_watched
from agentrl.evaluation.result import SetResult
from agentrl.evaluation.sets import TaskChoice
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup
from agentrl.obs.progress import Stopwatch
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.jobs import OnDone, sample_watched, step_jobs
from agentrl.runtime.services import Stack
from agentrl.runtime.task_order import TaskOrder
from agentrl.train.gpu_time_sharing import Turns
from agentrl.weight_sync.base import WeightSync


class RolloutSource(Protocol):
    """Gives a trainer its rollouts."""

    @property
    def steps(self) -> int:
        """Steps to train."""
        ...

    @property
    def samples(self) -> bool:
        """Whether rollouts are sampled as they are taken; otherwise the time that takes says nothing."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The token that fills batches."""
        ...

    @property
    def sets(self) -> Sequence[TaskChoice]:
        """What to evaluate on; without any nothing is evaluated."""
        ...

    async def follow(self, learner: LearnerGroup, version: int, watch: Stopwatch) -> None:
        """Bring the learner's weights, as policy ``version``, to whoever samples; ``watch`` gets the seconds."""
        ...

    async def take(self, step: int, position: int) -> list[Rollout]:
        """Return the rollouts of ``step`` (from 1); ``position`` tasks were taken before.

        Raises:
            AgentrlError: they cannot be had; `RunStopped` where Ctrl-C or the failure policy ends the run.

        """
        ...

    async def make_way(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Leave what the learner needs to train to it, until `follow`; ``watch`` gets the seconds."""
        ...

    async def trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Hear, by ``rollout_id``, with which advantages the rollouts of ``step`` are trained."""
        ...

    def figures(self) -> dict[str, float]:
        """Return what a step's row shows of whoever sampled, since the last call."""
        ...

    async def evaluate(self, on_done: OnDone) -> list[SetResult]:
        """Evaluate on `sets`; ``on_done`` gets every rollout."""
        ...


@dataclass(slots=True)
class Sampling:
    """Implements `RolloutSource` with the engines and the tool servers of a run.

    An engine that was started again gets the learner's weights while episodes are played: only then does nobody else use
    the learner, and are its weights those of a whole step. Where engines and learner have the same GPUs in turns, it is
    started only then, too.
    """

    config: Config
    stack: Stack
    order: TaskOrder
    sync: WeightSync
    recorder: RolloutRecorder
    interrupt: Interrupt
    sets: Sequence[TaskChoice] = ()
    """What to evaluate on."""
    restart_sync: WeightSync | None = None
    """Brings the weights to an engine that was started again, where ``sync`` cannot while the learner sleeps."""
    _turns: Turns | None = field(default=None, init=False)
    """None: the engines keep their memory, and the learner its own."""
    _runner: EpisodeRunner | None = field(default=None, init=False)
    _learner: LearnerGroup | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)
    """Of the learner's weights."""
    _sent: int | None = field(default=None, init=False)
    """The version that engines were sent last."""
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by whoever uses the learner; by the trainer wherever no episodes are played."""

    async def open(self) -> None:
        """Begin: the learner is the trainer's."""
        await self._busy.acquire()
        fleet = self.stack.fleet
        if self.config.placement.mode == "colocate":
            self._turns = Turns(fleet)
            fleet.resend_with(self._resend, launch_in=self._busy)
        else:
            fleet.resend_with(self._resend)

    @property
    def steps(self) -> int:
        """Return ``train.steps``."""
        return self.config.train.steps

    @property
    def samples(self) -> bool:
        """Yes."""
        return True

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's."""
        return self.stack.renderer.pad_token_id

    async def follow(self, learner: LearnerGroup, version: int, watch: Stopwatch) -> None:
        """Send the weights to all engines, unless ``weights.sync_every`` lets these wait.

        Raises:
            EngineError: an engine that lives did not take them.

        """
        self._learner, self._version = learner, version
        if self._turns is not None:
            await self._turns.to_engines(learner, self._send, watch)
        elif self._sent is None or version - self._sent >= self.config.weights.sync_every:
            with watch("sync"):
                await self._send()

    async def make_way(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Take the engines' memory from them, where the learner needs it.

        Raises:
            EngineError: an engine that lives keeps its memory.
            LearnerError: there is not enough memory for the learner.

        """
        if self._turns is not None:
            await self._turns.to_learner(learner, watch)

    async def _send(self) -> None:
        assert self._learner is not None, "follow comes first"
        fleet = self.stack.fleet
        while engines := fleet.live:
            try:
                await self.sync.push(self._learner, engines, self._version)
                break
            except EngineError:
                await fleet.look()
                if set(engines) <= set(fleet.live):
                    raise
                # One of them is lost. It gets the weights once it is back; the others get them from the beginning.
        self._sent = self._version

    async def _resend(self, engine: EngineControl) -> int:
        async with nullcontext() if self._turns is not None else self._busy:  # in turns, all of a restart is inside
            assert self._learner is not None, "episodes are played with its weights"
            await (self.restart_sync or self.sync).push(self._learner, [engine], self._version)
            return self._version

    @asynccontextmanager
    async def _playing(self) -> AsyncIterator[None]:
        """Leave the learner to engines that were started again."""
        self._busy.release()
        try:
            yield
        finally:
            await self._busy.acquire()

    async def take(self, step: int, position: int) -> list[Rollout]:
        """Play a step's episodes; each rollout is on disk once it has its reward."""
        jobs = step_jobs(self.config, self.order, step, position, self.config.rollout.batch_size)
        self.recorder.begin(step, jobs[0].task.id)
        self._runner = self._runner or self.stack.runner()
        write = partial(self.recorder.write, step)
        self.stack.fleet.figures()  # what came before, such as an evaluation, is not of this step
        async with self._playing():
            return await sample_watched(self._runner, jobs, self.stack, self.interrupt, write)

    def figures(self) -> dict[str, float]:
        """Return the fleet's."""
        return self.stack.fleet.figures()

    async def trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Write the advantages beside the step's rollouts."""
        await asyncio.to_thread(self.recorder.finish, step, advantages)

    async def evaluate(self, on_done: OnDone) -> list[SetResult]:
        """Play the episodes of all sets, with the newest weights."""
        if self._sent != self._version:
            await self._send()
        async with self._playing():
            return await evaluate_watched(self.sets, self.stack, self.interrupt, on_done)
