"""Demonstrations by index, for data loaders with several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.config.schema import Config
from agentrl.config.sft import SftConfig, SftStage
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError
from agentrl.core.registry import make_env, make_tasks, registered_tool
from agentrl.core.task import Task, TaskSet
from agentrl.core.tool import Tool
from agentrl.core.types import Row, ToolCall, ToolResult
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.run_tools import service_options
from agentrl.sft.demonstrate import LocalTool, demonstrate


@dataclass(frozen=True, slots=True)
class Demonstrated:
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
    env: Env
    tools: Mapping[str, LocalTool]
    served: Mapping[str, Tool]
    """Tools of servers as the run's options configure them, in place of the environment's."""


class Demonstrations:
    """Item ``i`` holds the demonstrations of the steps on world ``i``, in order. A pure function of the configuration.

    Items are independent, so any process may make any of them; the object can be pickled.

    Args:
        config: of the run.
        make_renderer: builds the renderer, once in each process.

    Raises:
        ConfigError: no taskset is named.
        UnknownNameError: the environment, one of its tools or the taskset is not registered.

    """

    def __init__(self, config: Config, make_renderer: Callable[[], ChatRenderer]) -> None:
        if config.tasks.name is None:
            raise ConfigError("tasks.name is not set: demonstrations come from a taskset's demonstrator()")
        self._config = config
        self._make_renderer = make_renderer
        self._renderer: ChatRenderer | None = None
        self._scene: tuple[Any, _Scene] | None = None

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer, built on first access in each process."""
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without renderer and scene, which each process builds."""
        return {**self.__dict__, "_renderer": None, "_scene": None}

    @property
    def _sft(self) -> SftConfig:
        return self._config.sft

    def __len__(self) -> int:
        """Return the number of items."""
        return -(-self._sft.steps // self._sft.steps_per_world)

    def __getitem__(self, index: int) -> list[Demonstrated]:
        """Return the demonstrations of the steps from ``index * steps_per_world`` on."""
        first = index * self._sft.steps_per_world
        steps = range(first, min(first + self._sft.steps_per_world, self._sft.steps))
        scene = self._enter(index, self.stage(first))
        rng = np.random.default_rng([self._sft.seed, index])
        return [self._step(scene, rng) for _ in steps]

    def close(self) -> None:
        """Close the sessions of tools in this process; they are opened again for another item."""
        scene, self._scene = self._scene, None
        for tool in () if scene is None else scene[1].tools.values():
            getattr(tool, "close", lambda: None)()

    def stage(self, step: int) -> SftStage | None:
        """Return the curriculum's stage of ``step``, or None after the last."""
        for stage in self._sft.curriculum:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return None

    def _step(self, scene: _Scene, rng: np.random.Generator) -> Demonstrated:
        done = [self._episode(scene, rng) for _ in range(self._sft.batch_size)]
        return Demonstrated([row for row, _ in done], float(np.mean([reward for _, reward in done])))

    def _episode(self, scene: _Scene, rng: np.random.Generator) -> tuple[Row, float]:
        task = scene.tasks[int(rng.integers(len(scene.tasks)))]
        return demonstrate(
            scene.env,
            task,
            scene.taskset.demonstrator(task, rng),
            seed=int(rng.integers(2**31)),
            tools=scene.tools,
            renderer=self.renderer,
            encode=self.renderer.encode,
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
            assert config.tasks.name is not None, "checked by the constructor"
            taskset = make_tasks(config.tasks.name, options)
            env = make_env(config.env.name, env_options)
            tools, served = self._tools(env, taskset)
            self._scene = (key, _Scene(taskset, taskset.split(config.tasks.train_split), env, tools, served))
        return self._scene[1]

    def _tools(self, env: Env, taskset: TaskSet) -> tuple[dict[str, LocalTool], dict[str, Tool]]:
        """Return the functions that answer calls, and the tools offered to the expert, both by tool name."""
        tools = {tool.name: _in_process(tool) for tool in env.tools if not tool.server}
        offered: dict[str, Tool] = {}
        for name in env.tool_names:
            found = registered_tool(name)
            if isinstance(found, Tool):
                tools[found.name] = _in_process(found)
                continue
            options = service_options(self._config, name, found)
            served = {tool.name: tool for tool in found.tools(options)}
            local = found.local(taskset.corpora(), options)
            offered |= served
            tools |= dict.fromkeys(served or (name,), local)
        return tools, offered


def _in_process(tool: Tool) -> LocalTool:
    def run(call: ToolCall) -> ToolResult:
        return asyncio.run(tool.run(call))

    return run
