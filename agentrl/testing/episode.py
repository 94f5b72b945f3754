"""An episode without a model or a server, for tests of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.extras import require
from agentrl.core.task import Task
from agentrl.core.tool import ToolClient
from agentrl.core.types import Rollout, SamplingParams
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.testing.sampler import Script, ScriptedSampler


def play_episode(
    env_factory: Callable[[], Env],
    task: Task,
    script: Script,
    *,
    model: str = "multihop-warm",
    tool_clients: Mapping[str, ToolClient] | None = None,
    seed: int = 0,
    max_turns: int = 16,
    max_tokens: int = 8192,
) -> Rollout:
    """Run an episode of ``task`` with the scripted answers of ``script``. Not for use inside an event loop.

    The episode runs as in training, tokens and masks included; an error in it is raised, never dropped.

    Args:
        env_factory: builds the environment; the class itself if it needs no arguments.
        task: of the episode.
        script: the policy's answers by turn; see `ScriptedSampler`.
        model: its tokenizer and chat template are used; as ``model.path``.
        tool_clients: by tool name, for tools with a server; the environment's own tools need none.
        seed: of the environment.
        max_turns: of the episode.
        max_tokens: of the episode.

    Raises:
        MissingError: transformers or jinja2 is not installed. torch is not needed.
        RunStopped: the environment, the task or a tool failed; the message has the error.
    """
    # Only this needs transformers, which is none of the core's packages, and loading it takes seconds.
    for package in ("transformers", "jinja2"):
        require(package, "agentrl.testing.play_episode")
    from agentrl.models.resolve import resolve_model
    from agentrl.render.registry import load_renderer

    renderer = load_renderer(resolve_model(model))
    stop = dict.fromkeys(("sampler", "environment", "tool", "sandbox", "task"), "stop")
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=env_factory,
                    renderer=renderer,
                    sampler=ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id),
                    tool_clients=tool_clients or {},
                    limits=Limits(max_turns, max_tokens, max_seconds=60.0, max_new_tokens=max_tokens),
                    sampling=SamplingParams(max_new_tokens=max_tokens),
                )
            )
        },
        FailurePolicy(FailureConfig.model_validate(stop)),
        EpisodeSlots(1),
    )
    (rollout,) = asyncio.run(runner.run(task, seed, task.id))
    return rollout
