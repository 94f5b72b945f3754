"""A stopped engine, a real one: the watchdog names it. For stopped learner ranks see test_learner_ray.py."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from deadlines import until

from agentrl.config.rollout import FailureConfig
from agentrl.config.sampler import EmbeddedConfig
from agentrl.core.env import Env
from agentrl.core.task import Task
from agentrl.core.types import Message, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess, launch_embedded
from agentrl.models.load import load_tokenizer
from agentrl.models.resolve import resolve_model
from agentrl.obs.waiting import PHASE, waiting
from agentrl.obs.watchdog import Watchdog
from agentrl.render.registry import make_renderer
from agentrl.weight_sync.engines import check_version


class Stops(Env):
    """Stops the engine in its first step."""

    engine: EngineProcess

    def step(self, action: Any) -> Any:
        self.engine_signal(signal.SIGSTOP)
        return (Message("user", "more"),), 1.0, False, False, {}

    @classmethod
    def engine_signal(cls, number: int) -> None:
        os.killpg(cls.engine.child.pid, number)


async def reported(notes: list[str], text: str) -> None:
    await until(lambda: any(text in report for report in notes))


def test_a_stopped_engine_is_named_in_a_rollout_and_in_a_push(tmp_path: Path) -> None:
    model = resolve_model("multihop-warm")
    Stops.engine = launch_embedded(model, EmbeddedConfig(slots=8, context=512, threads=1), log=tmp_path / "log")
    url, notes = Stops.engine.url, []

    async def play() -> None:
        client = SGLangClient(url, timeout_s=60)
        runner = EpisodeRunner(
            {
                "": EpisodeSettings(
                    EpisodeContext(
                        env_factory=Stops,
                        renderer=make_renderer(load_tokenizer(model)),
                        sampler=client,
                        tool_clients={},
                        limits=Limits(max_turns=2, max_tokens=256, max_seconds=60, max_new_tokens=8),
                        sampling=SamplingParams(max_new_tokens=8),
                    )
                )
            },
            FailurePolicy(FailureConfig()),
            EpisodeSlots(2),
        )
        with Watchdog(1.0, notes.append):
            job = Job(Task("t", (Message("user", "hello"),)), 0, "5/1/0")
            with waiting(PHASE, "step 5", "rollout"):
                episode = asyncio.create_task(runner.run_many([job]))
                where = f"rollout 5/1/0, turn 2: sampling 5/1/0/1: request to the engine {url}, since "
                await reported(notes, f"step 5, rollout, waiting for\n    {where}")
            with waiting(PHASE, "step 5", "weights"):
                check = asyncio.create_task(check_version([client], 0))
                await reported(notes, f"engine 0 of 1, check of the policy version: engine {url}, /model_info, since ")
            Stops.engine_signal(signal.SIGCONT)
            await check
            [rollout] = await episode
            assert len(rollout.turns) == 2
        await client.aclose()

    try:
        asyncio.run(play())
    finally:
        Stops.engine_signal(signal.SIGCONT)
        Stops.engine.stop()
