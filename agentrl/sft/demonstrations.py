"""Demonstrations by index, for data loaders with several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from agentrl.config.schema import Config
from agentrl.config.sft import SftConfig, SftStage
from agentrl.core.env import Env
from agentrl.core.registry import env_class, make_env, make_tasks
from agentrl.core.task import Task, TaskSet
from agentrl.core.tool import Tool, ToolClient, ToolService
from agentrl.core.types import Row
from agentrl.data.task_sources import read_split
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.run_tools import served_tools, service_options
from agentrl.sft.demonstrate import demonstrate
from agentrl.toolserver.service import find_service


@dataclass(frozen=True, slots=True)
class StepDemonstrations:
    """The demonstrations of one optimizer step."""

    rows: list[Row]
    """One row per episode."""
    reward: float
    """Mean reward of the episodes, the expert's mistakes included."""


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


class Demonstrations:
    """Item ``i`` holds the demonstrations of the steps on world ``i``, in order. A pure function of the configuration.

    Items are independent, so any process may make any of them; the object can be pickled.

    Args:
        config: of the run, checked by `agentrl.sft.preflight.check_sft`.
        make_renderer: builds the renderer, once in each process.
    """

    def __init__(self, config: Config, make_renderer: Callable[[], ChatRenderer]) -> None:
        self._config = config
        self._make_renderer = make_renderer
        self._renderer: ChatRenderer | None = None
        self._services: Mapping[str, ToolService] | None = None
        self._scene: tuple[Any, _Scene] | None = None

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer, built on first access in each process."""
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without renderer, services and scene, which each process builds."""
        return {**self.__dict__, "_renderer": None, "_services": None, "_scene": None}

    @property
    def _sft(self) -> SftConfig:
        return self._config.sft

    def __len__(self) -> int:
        """Return the number of items."""
        return -(-self._sft.steps // self._sft.steps_per_world)

    def __getitem__(self, index: int) -> list[StepDemonstrations]:
        """Return the demonstrations of the steps from ``index * steps_per_world`` on."""
        first = index * self._sft.steps_per_world
        steps = range(first, min(first + self._sft.steps_per_world, self._sft.steps))
        scene = self._enter(index, self.stage(first))
        rng = np.random.default_rng([self._sft.seed, index])
        done: list[StepDemonstrations] = []
        asyncio.run(self._run_steps(scene, rng, len(steps), done))
        return done

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

    async def _run_steps(
        self, scene: _Scene, rng: np.random.Generator, steps: int, done: list[StepDemonstrations]
    ) -> None:
        """Append the demonstrations of each step to ``done``.

        They are not returned, because `asyncio.run` may format the result of its coroutine, which takes seconds. The
        episodes run one after another, because their experts draw from the same random generator.
        """
        for _ in range(steps):
            episodes = [await self._episode(scene, rng) for _ in range(self._sft.batch_size)]
            done.append(
                StepDemonstrations([row for row, _ in episodes], float(np.mean([reward for _, reward in episodes])))
            )

    async def _episode(self, scene: _Scene, rng: np.random.Generator) -> tuple[Row, float]:
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
            self._services = {name: find_service(name) for name in env_class(config.env.name).tool_names}
        clients = {
            name: service.local_client(taskset.corpora(), service_options(config, name, service))
            for name, service in self._services.items()
        }
        return clients, served_tools(config, self._services)


async def _close(clients: Iterable[ToolClient]) -> None:
    for client in clients:
        await client.aclose()
