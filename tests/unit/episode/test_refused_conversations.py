"""Conversations that the chat template refuses: an episode's failure, whatever the template raises."""

import asyncio
from collections.abc import Sequence

import pytest
from byte_renderer import byte_renderer

from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.task import Task
from agentrl.core.tool import tool
from agentrl.core.types import FailureKind, Message, Rewrite, Rollout, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import ScriptedSampler
from tests.unit.episode.conftest import CHATML

REFUSES = "{% for m in messages %}{% if m.role == 'tool' or 'refuse' in m.content %}"
RAISES = {
    "raise_exception": "{{ raise_exception('not this one') }}",
    "an undefined name": "{{ nothing.at.all }}",
    "a wrong type": "{{ m.content + 1 }}",
    "a division": "{{ 1 // 0 }}",
    "a missing method": "{{ m.content.items() }}",
    "a missing index": "{{ m.content.index('☃') }}",
}
"""What a template may run into."""


@tool(timeout_s=1)
async def look_up(word: str) -> str:
    """Look a word up."""
    return word


class Asks(Env):
    """Answers a turn with the message, or the conversation, that the policy names."""

    tools = (look_up,)

    def step(self, action):
        content = action.content
        if content == "system":
            return (Message("system", "refuse this"),), 0.0, False, False, {}
        if content == "rewrite":
            return Rewrite((Message("user", "refuse this"),)), 0.0, False, False, {}
        return (), 1.0, True, False, {}


def run(renderer: ChatRenderer, says: str, prompts: Sequence[Message]) -> list[Rollout]:
    """Run an episode for each prompt; the policy says the same in each, and then ``done``."""
    script = [says, "done"]
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=Asks,
                    renderer=renderer,
                    sampler=ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id),
                    tool_clients={},
                    limits=Limits(4, 100_000, max_seconds=30.0, max_new_tokens=1000),
                    sampling=SamplingParams(max_new_tokens=1000),
                )
            )
        },
        FailurePolicy(FailureConfig(max_failed_share=1)),
        EpisodeSlots(2),
    )
    jobs = [Job(Task(f"t{number}", (prompt,)), 0, f"e{number}") for number, prompt in enumerate(prompts)]
    return asyncio.run(runner.run_many(jobs))


def renderer_that(raises: str) -> ChatRenderer:
    refuses = f"{REFUSES}{RAISES[raises]}{{% endif %}}{{% endfor %}}"
    tools = "{% for t in tools or [] %}{{ t.function.name + t.function.description }}{% endfor %}"
    return byte_renderer(refuses + tools + CHATML)


@pytest.mark.parametrize("raises", RAISES)
@pytest.mark.parametrize(
    "says", ['<tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call>', "system", "rewrite"]
)
def test_what_the_template_refuses_ends_the_episode_alone(raises: str, says: str) -> None:
    (failed,) = run(renderer_that(raises), says, [Message("user", "begin")])
    assert failed.failure is not None
    assert (failed.failure.kind, failed.failure.error) == (FailureKind.TASK, "ConversationError")
    assert "refuses messages of roles user" in failed.failure.message
    assert (failed.stop_reason, failed.dropped) == (StopReason.FAILED, True)


def test_a_first_prompt_that_is_refused_ends_its_episode_alone() -> None:
    prompts = [Message("user", "refuse this"), Message("user", "begin"), Message("user", "raw", inline=True)]
    refused, well, raw = run(renderer_that("raise_exception"), "done", prompts)
    assert refused.failure is not None
    assert (refused.failure.kind, refused.dropped) == (FailureKind.TASK, True)
    assert (well.stop_reason, raw.stop_reason) == (StopReason.TERMINATED, StopReason.TERMINATED)
