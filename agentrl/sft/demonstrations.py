"""Demonstrations by index, for data loaders with several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.config.sft import SftConfig, SftStage
from agentrl.core.env import Env
from agentrl.core.registry import env_class, make_env, make_tasks
from agentrl.core.task import Task, TaskSet
from agentrl.core.tool import Tool, ToolClient, ToolService
from agentrl.data.task_sources import read_split
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.run_tools import served_tools, service_options
from agentrl.sft.base import SftData, StepRows
from agentrl.sft.demonstrate import Demonstration, demonstrate
from agentrl.toolserver.service import find_service


@dataclass(slots=True)
class _Scene:
    """Taskset, environment and tools of one world and stage."""

    taskset: TaskSet
    tasks: Sequence[Task]
    env_factory: Callable[[], Env]
    clients: Mapping[str, ToolClient]
    """Run the environment's registered tools in this process."""
    served: Mapping[str, Tool]
    """These tools as the run's options configure them, in place of the environment's."""


class Demonstrations(SftData):
    """Item ``i`` holds the demonstrations of the steps on world ``i``, one row per episode.

    Args:
        config: of the run, checked by `agentrl.sft.preflight.check_sft`.
        make_renderer: builds the renderer, once in each process.
    """

    def __init__(self, config: Config, make_renderer: Callable[[], ChatRenderer]) -> None:
        super().__init__(make_renderer)
        self.steps_per_item = config.sft.steps_per_world
        self._config = config
        self._services: Mapping[str, ToolService] | None = None
        self._scene: tuple[Any, _Scene] | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_services": None, "_scene": None}

    @property
    def _sft(self) -> SftConfig:
        return self._config.sft

    @property
    def _steps(self) -> int:
        assert self._sft.steps is not None, "only chats have no number of steps before they are read"
        return self._sft.steps

    @override
    def __len__(self) -> int:
        return -(-self._steps // self.steps_per_item)

    @override
    def __getitem__(self, index: int) -> list[StepRows]:
        first = index * self.steps_per_item
        steps = range(first, min(first + self.steps_per_item, self._steps))
        scene = self._enter(index, self.stage(first))
        rng = np.random.default_rng([self._sft.seed, index])
        done: list[StepRows] = []
        asyncio.run(self._run_steps(scene, rng, len(steps), done))
        return done

    @override
    def close(self) -> None:
        """Close the sessions of tools in this process; they are opened again for another item."""
        scene, self._scene = self._scene, None
        if scene is not None:
            asyncio.run(_close(scene[1].clients.values()))

    def stage(self, step: int) -> SftStage | None:
        """Return the curriculum's stage of ``step``, or None after the last."""
        for stage in self._sft.curriculum:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return None

    async def _run_steps(self, scene: _Scene, rng: np.random.Generator, steps: int, done: list[StepRows]) -> None:
        """Append the demonstrations of each step to ``done``.

        They are not returned, because `asyncio.run` may format the result of its coroutine, which takes seconds. The
        episodes run one after another, because their experts draw from the same random generator.
        """
        for _ in range(steps):
            episodes = [await self._episode(scene, rng) for _ in range(self._sft.batch_size)]
            metrics = {"sft/reward": float(np.mean([episode.reward for episode in episodes]))}
            images = {digest: image for episode in episodes for digest, image in episode.images.items()}
            done.append(StepRows([episode.row for episode in episodes], metrics, images))

    async def _episode(self, scene: _Scene, rng: np.random.Generator) -> Demonstration:
        task = scene.tasks[int(rng.integers(len(scene.tasks)))]
        return await demonstrate(
            scene.env_factory,
            task,
            scene.taskset.demonstrator(task, rng),
            seed=int(rng.integers(2**31)),
            tool_clients=scene.clients,
            renderer=self.renderer,
            max_turns=self._config.rollout.max_turns,
            served=scene.served,
        )

    def _enter(self, index: int, stage: SftStage | None) -> _Scene:
        """Return the scene of an item; the last one is cached, because without ``sft.reseed_option`` many items share it."""
        config = self._config
        options = {**config.tasks.options, **(stage.tasks if stage else {})}
        if self._sft.reseed_option is not None:
            options[self._sft.reseed_option] = self._sft.seed + index
        env_options = {**config.env.options, **(stage.env if stage else {})}
        key = (options, env_options)
        if self._scene is None or self._scene[0] != key:
            assert config.tasks.name is not None, "checked by check_sft"
            taskset = make_tasks(config.tasks.name, options)
            env_factory = partial(make_env, config.env.name, env_options)
            clients, served = self._tools(taskset)
            tasks = read_split(taskset, config.tasks.train_split, "tasks.train_split")
            self._scene = (key, _Scene(taskset, tasks, env_factory, clients, served))
        return self._scene[1]

    def _tools(self, taskset: TaskSet) -> tuple[dict[str, ToolClient], dict[str, Tool]]:
        """Return the clients of the environment's registered tools, and what they offer to the expert by tool name."""
        config = self._config
        if self._services is None:
            env = env_class(config.env.name)
            self._services = {name: find_service(name) for name in env.registered_tools(config.env.options)}
        clients = {
            name: service.local_client(taskset.corpora(), service_options(config, name, service))
            for name, service in self._services.items()
        }
        return clients, served_tools(config, self._services)


async def _close(clients: Iterable[ToolClient]) -> None:
    for client in clients:
        await client.aclose()
