"""Episodes of verifiers through the gateway, with a scripted policy."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from gateway_episodes import make_test_renderer

from agentrl import Rollout, Task
from agentrl.adapters.verifiers.play import play
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import EngineLostError
from agentrl.core.types import Generation, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.testing import RecordedRequest, ScriptedSampler

RENDERER = make_test_renderer()


class LostEngine(ScriptedSampler):
    """An engine that each request finds dead."""

    async def generate(self, *arguments: Any, **options: Any) -> Generation:
        raise EngineLostError("the engine does not answer")


async def play_tasks(
    tasks: Sequence[Task],
    speak: Callable[[str], str],
    *,
    max_turns: int = 10,
    max_seconds: float = 300.0,
    lost: Sequence[str] = (),
) -> tuple[list[Rollout], ScriptedSampler]:
    """Play an episode of each task at the same time; ``speak`` returns the policy's turn after the text of a prompt.

    Engines with the names of ``lost`` are lost by their first request. The last engine never is, unless it is named
    ``engine-last``.
    """

    def answer(request: RecordedRequest) -> str:
        return speak(RENDERER.decode(request.prompt.token_ids))

    sampler = ScriptedSampler(answer, encode=RENDERER.encode, end_token_id=RENDERER.end_token_id)
    limits = Limits(max_turns=max_turns, max_tokens=1_000_000, max_seconds=max_seconds, max_new_tokens=4096)
    router = RoutedSampler()

    def lose(name: str) -> None:
        router.remove(name)
        if not router.slots:
            router.fail(f"no engine is left. {name} ended with signal 9")

    router.on_lost = lose
    for name in lost:
        router.add(name, LostEngine([], encode=RENDERER.encode))
    if "engine-last" not in lost:
        router.add("engine-last", sampler)
    context = EpisodeContext(Env, RENDERER, router, {}, limits, SamplingParams(max_new_tokens=4096, seed=5))
    failure = FailureConfig(sampler="drop", agent="drop", max_failed_share=1)
    settings = EpisodeSettings(context, generate=play)
    runner = EpisodeRunner({"": settings}, FailurePolicy(failure), EpisodeSlots(len(tasks)))
    jobs = [Job(task, 1, f"e{number}") for number, task in enumerate(tasks)]
    groups = await asyncio.gather(*(runner.run_many([job]) for job in jobs))
    return [rollout for group in groups for rollout in group], sampler


def policy_texts(rollout: Rollout) -> list[str]:
    """Return what is trained on, turn by turn."""
    return [turn.action for turn in rollout.turns]
