"""Episodes of adapters through agentrl's runner, many at the same time, played by a function of the conversation."""

import asyncio
import re
from collections.abc import Callable, Sequence

from gateway_episodes import make_test_renderer

from agentrl.audit.run import rollout_faults
from agentrl.batch.provenance import check_rows
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.task import Task
from agentrl.core.types import Rollout, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.testing import RecordedRequest, ScriptedSampler

_HINT = re.compile(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\n(Higher|Lower)\.")


def play(
    env: Callable[[], Env], play_turn: Callable[[str], str], tasks: Sequence[Task], *, group: int = 1
) -> list[Rollout]:
    """Play a group of episodes of each task, all at the same time. The episodes of a task are reset with one seed.

    Args:
        env: builds the environment.
        play_turn: from the conversation as the policy reads it to its next turn.
        tasks: the problems.
        group: episodes of a task.
    """
    renderer = make_test_renderer()

    def answer(request: RecordedRequest) -> str:
        return play_turn(renderer.decode(request.prompt.token_ids))

    context = EpisodeContext(
        env_factory=env,
        renderer=renderer,
        sampler=ScriptedSampler(answer, encode=renderer.encode, end_token_id=renderer.end_token_id),
        tool_clients={},
        limits=Limits(max_turns=30, max_tokens=100_000, max_seconds=120.0, max_new_tokens=1000),
        sampling=SamplingParams(max_new_tokens=1000),
    )
    policy = FailurePolicy(FailureConfig(environment="drop", max_failed_share=1.0))
    jobs = [
        Job(task, number * group + member, f"e{number}-{member}", reset_seed=number)
        for number, task in enumerate(tasks)
        for member in range(group)
    ]
    runner = EpisodeRunner({"": EpisodeSettings(context)}, policy, EpisodeSlots(len(jobs)))
    rollouts = asyncio.run(runner.run_many(jobs))
    for rollout in rollouts:
        check_rows(rollout.rows)
        assert rollout_faults(rollout) == []
    return rollouts


def bisect(conversation: str) -> str:
    """Return the next guess of a number up to 100, after the hints so far."""
    low, high = 1, 100
    for guess, hint in _HINT.findall(conversation):
        low, high = (int(guess) + 1, high) if hint == "Higher" else (low, int(guess) - 1)
    return str((low + high) // 2)
