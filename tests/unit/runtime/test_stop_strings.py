"""`sampler.stop` ends turns like the stop strings of an environment, and is a key that rollouts are made with."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from byte_renderer import byte_renderer

from agentrl.config.load import load_config
from agentrl.config.recorded import recorded_keys
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task
from agentrl.core.types import Message
from agentrl.data.jobs import Job
from agentrl.episode.runner import EpisodeSlots
from agentrl.runtime.episodes import make_runner
from agentrl.runtime.judges import OtherModels
from agentrl.testing import ScriptedSampler
from tests.unit.episode.conftest import CHATML


def test_stop_strings_of_the_run_and_of_the_environment_end_a_turn() -> None:
    renderer = byte_renderer(CHATML)
    sampler = ScriptedSampler(["a.", "b."], encode=renderer.encode, end_token_id=renderer.end_token_id)
    settings = ["env.name=tools", "env.options.stop=['</x>']", "sampler.stop=['.', '</x>']", "reward=exact_match"]
    config = load_config(None, settings)
    tools: Any = SimpleNamespace(source_clients=lambda _: {}, offered={"": {}})
    runner = make_runner(config, renderer, sampler, tools, OtherModels(), EpisodeSlots(1), None)
    job = Job(Task("t0", (Message("user", "go"),), answer="a."), 0, "1/0/0")
    [rollout] = asyncio.run(runner.run_many([job]))
    assert sampler.requests[0].params.stop == (".", "</x>")
    assert (rollout.turns[0].action, rollout.turns[0].finish_reason.value) == ("a.", "stop")
    assert recorded_keys(config)["sampler.stop"] == "[., </x>]"


def test_a_stop_string_has_a_character() -> None:
    with pytest.raises(ConfigError, match=r"sampler\.stop"):
        load_config(None, ["sampler.stop=['']"])
