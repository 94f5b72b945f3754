"""What fails in an author's environment is said with the author's file and line, and what its methods should return."""

import asyncio
import json
import logging
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config.rollout import FailureConfig
from agentrl.core.env import AsyncEnv, Env
from agentrl.core.errors import RunStopped
from agentrl.core.task import Task
from agentrl.core.types import FailureKind, Message, Rewrite, Rollout, SamplingParams, ToolResults
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.testing import ScriptedSampler

TASK = Task("t", (Message("user", "Hi?"),))
NEXT = (Message("user", "go on"),)


def runner(renderer, env, *, action="drop", generate=None) -> EpisodeRunner:
    return EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=env,
                    renderer=renderer,
                    sampler=ScriptedSampler(
                        ["a", "b", "c"], encode=renderer.encode, end_token_id=renderer.end_token_id
                    ),
                    tool_clients={},
                    limits=Limits(max_turns=3, max_tokens=512, max_seconds=30.0, max_new_tokens=16),
                    sampling=SamplingParams(max_new_tokens=16),
                ),
                generate=generate,
            )
        },
        FailurePolicy(FailureConfig(environment=action, max_failed_share=1.0)),
        EpisodeSlots(4),
    )


def fail(renderer, env, **options) -> str:
    """Return the message of the failure that ends an episode of ``env``."""
    rollout: Rollout
    (rollout,) = asyncio.run(runner(renderer, env, **options).run(TASK, 1, "e"))
    assert rollout.failure is not None, "the episode did not fail"
    assert rollout.failure.kind is FailureKind.ENVIRONMENT
    return rollout.failure.message


def line_of(words: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {words}")]
    return f"(test_environment_failures.py:{number})"


def parse(text: str) -> Any:
    return json.loads(text)  # the author's line


class InConstructor(Env):
    def __init__(self) -> None:
        self.size = {}["size"]  # in the constructor


class InReset(Env):
    def reset(self, *, seed=None, options=None):
        raise ValueError("no board")  # in reset


class InStep(Env):
    def step(self, action):
        return parse(action.content), 0.0, False, False, {}


class InIterator(Env):
    def step(self, action):
        return next(iter(())), 0.0, False, False, {}  # no item


class InAsyncStep(AsyncEnv):
    async def astep(self, action):
        return parse(action.content), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("env", "words", "line"),
    [
        (InConstructor, "the environment's constructor raised KeyError: 'size'", "in the constructor"),
        (InReset, "InReset.reset raised ValueError: no board", "in reset"),
        (InStep, "InStep.step raised JSONDecodeError: Expecting value", "the author's line"),
        (InIterator, "InIterator.step raised StopIteration: no message", "no item"),
        (InAsyncStep, "InAsyncStep.astep raised JSONDecodeError: Expecting value", "the author's line"),
    ],
)
def test_the_failure_has_the_authors_line_and_the_log_the_traceback(renderer, caplog, env, words, line):
    with caplog.at_level(logging.WARNING, "agentrl"):
        jobs = [Job(TASK, seed, f"e{seed}") for seed in range(5)]
        rollouts = asyncio.run(runner(renderer, env).run_many(jobs))
    for rollout in rollouts:
        assert rollout.failure is not None
        assert words in rollout.failure.message
        assert line_of(line) in rollout.failure.message
    (record,) = caplog.records  # one for each line that raises, not for each episode
    assert record.exc_info is not None
    assert f"# {line}" in "".join(traceback.format_exception(record.exc_info[1]))


def test_a_stopped_run_is_raised_from_the_authors_exception(renderer):
    with pytest.raises(RunStopped) as raised:
        fail(renderer, InStep, action="stop")
    assert "# the author's line" in "".join(traceback.format_exception(raised.value))


def test_a_loop_of_the_users_own_fails_like_an_environment(renderer, caplog):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        parse((await chat.sample()).content)

    with caplog.at_level(logging.WARNING, "agentrl"):
        assert line_of("the author's line") in fail(renderer, Env, generate=generate)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("tools", [None, [len]])
def test_tools_that_are_none_are_named(renderer, tools):
    class Offers(Env):
        pass

    Offers.tools = tools
    assert f"Offers.tools must be a tuple of Tools, which @agentrl.tool makes, not {tools}" in fail(renderer, Offers)


def returning(first: Any = None, then: Any = None) -> type[Env]:
    class Returning(Env):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed, options=options) if first is None else first

        def step(self, action):
            return then

    return Returning


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (("Hi?", {}), None, "Returning.reset returned the observation 'Hi?'"),
        (NEXT, None, "Returning.reset must return (observation, info), it returned (Message("),
        ((NEXT[0], {}), None, "Returning.reset returned the observation Message("),
        ((NEXT, None), None, "Returning.reset returned the info None, which must be a dict"),
        (None, ("Higher.", 0.0, False, False, {}), "Returning.step returned the observation 'Higher.'"),
        (None, (["Higher."], 0.0, False, False, {}), "Returning.step returned the observation ['Higher.']"),
        (None, ((Message("user", 5),), 0.0, False, False, {}), "the observation (Message("),  # type: ignore[arg-type]
        (None, ((Message("me", "x"),), 0.0, False, False, {}), "the observation (Message("),  # type: ignore[arg-type]
        (None, (ToolResults(()), 0.0, False, False, {}), "Returning.step returned the observation ToolResults"),
        (None, (NEXT, 0.0, False, {}), "must return (observation, reward, terminated, truncated, info)"),
        (None, None, "must return (observation, reward, terminated, truncated, info), it returned None"),
        (None, (NEXT, 0.0, False, False, []), "Returning.step returned the info [], which must be a dict"),
        (
            None,
            (NEXT, 0.0, np.zeros(2) > 0, False, {}),
            "Returning.step returned terminated=array([False, False]), which",
        ),
        (None, (NEXT, "1.0", False, False, {}), "Returning: the reward is '1.0', not a finite number"),
        (None, (NEXT, 0.0, False, None, {}), "Returning.step returned truncated=None, which must be a bool"),
        (
            None,
            ((Message("user", "x", tool_calls=({},)),), 0.0, False, False, {}),  # type: ignore[arg-type]
            "the tool_calls of a message must be a tuple of ToolCall, and is ({},)",
        ),
        (
            None,
            (Rewrite((Message("user", None),)), 0.0, False, False, {}),  # type: ignore[arg-type]
            "the content of a message must be a str, and is None",
        ),
    ],
)
def test_what_a_method_should_return_is_said_in_one_line(renderer, first, then, words):
    message = fail(renderer, returning(first, then))
    assert words in message
    assert "\n" not in message
    if "observation '" in words:
        assert 'a tuple of messages, such as (Message("user", ' in message


def test_a_step_that_is_not_defined_is_named(renderer):
    class Nothing(Env):
        pass

    class NothingAsync(AsyncEnv):
        pass

    class Plain(AsyncEnv):
        def astep(self, action):
            raise ValueError(action)

    assert "Plain.astep raised ValueError: Message(" in fail(renderer, Plain)
    assert "Nothing defines no step(action)" in fail(renderer, Nothing)
    assert "NothingAsync defines no astep(action)" in fail(renderer, NothingAsync)
