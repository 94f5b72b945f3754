"""Environments of verifiers from 0.4, which drive their episodes themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from typing_extensions import override

from agentrl.adapters.verifiers.tasks import KEY, VerifiersOptions, list_tasks
from agentrl.core.env import Env, Step
from agentrl.core.errors import ConfigError
from agentrl.core.registry import build
from agentrl.core.task import Task
from agentrl.core.types import Action


class VerifiersEnv(Env):
    """An environment of verifiers. Its agents get the policy's turns from the gateway, and its reward is that of the rollout.

    Args: see `VerifiersOptions`.
    """

    generate: ClassVar[str | None] = "agentrl.adapters.verifiers.play:play"

    def __init__(
        self,
        id: str,
        config: Mapping[str, object] = {},
        eval_config: Mapping[str, object] | None = None,
        python: str = sys.executable,
        size: int = 1000,
        eval_size: int = 100,
    ) -> None:
        VerifiersOptions(id, config, eval_config, python, size, eval_size)

    @classmethod
    @override
    def configured_tasks(cls, split: str, seed: int, options: Mapping[str, object]) -> Sequence[Task]:
        read_options: Callable[..., VerifiersOptions] = VerifiersOptions
        return list_tasks(build(read_options, options, KEY), split)

    @override
    def step(self, action: Action) -> Step:
        raise ConfigError("env.name=verifiers plays its episodes itself and has no steps: leave out what steps it")
