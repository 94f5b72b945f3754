"""What is refused before a run whose agent program works in the machines of its tasks."""

import re

import pytest

from agentrl.config.checks import check
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.runtime.checks import check_episodes

PROGRAM = ("rollout.agent.command=x", "rollout.agent.sandbox=container")


def run_config(*settings: str) -> Config:
    return load_config(None, ["data.path=x.jsonl", *settings])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            PROGRAM,
            "rollout.agent.reward=function with rollout.agent.sandbox=container: the tests of the task give the reward",
        ),
        ((*PROGRAM, "rollout.agent.reward=environment", "rollout.agent.cwd=/tmp"), "rollout.agent.cwd=/tmp with"),
        (
            ("env.roles.a.program={command: x, sandbox: container}",),
            "env.roles.a.program.sandbox=container, but programs that play an agent have no machine of a task",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(run_config("env.name=terminal", *settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("env.name=single_turn",),
            "rollout.agent.sandbox=container with env.name=single_turn, which opens no machine",
        ),
        (
            ("env.name=terminal", "containers.runtime=runsc"),
            "rollout.agent.sandbox=container with containers.runtime=runsc",
        ),
    ],
)
def test_what_a_machine_lacks_is_named(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_episodes(run_config(*settings, *PROGRAM, "rollout.agent.reward=environment"))
