"""Process of `agentrl.adapters.verifiers`, run by the interpreter that has verifiers: lists tasks, and plays episodes.

It imports nothing of agentrl. For each line of JSON ``{"number", "call", ...arguments}`` at its standard input it prints a line
``{"number", "value"}`` or ``{"number", "error"}`` to its standard output, in any order. A call is `list_tasks` or `play`.
It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import logging
import math
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.v1 import Episode, Task, TaskData

READY = "ready"
Json = dict[str, Any]
"""A JSON object."""
EPISODES = 512
"""Episodes after which an environment's servers are opened again: they keep a client for each episode."""
_END_S = 10.0
"""Seconds in which episodes in progress end their agents."""
_KEY_VARIABLE = "AGENTRL_SESSION_KEY"


class Serving:
    """An environment with its servers, which are closed when it is retired and its last episode is over."""

    def __init__(self, config: Json) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self.env = load_environment(resolve_env_config(_with_local_runtimes(_with_module(config))))
        roles = [name for name, agent in agent_config_fields(self.env.config).items() if agent.client is None]
        if len(roles) != 1:
            raise ValueError(
                f"the agents {', '.join(roles) or 'all'} {'would all be the policy' if roles else 'have a client'}: one agent is "
                "the policy, and all others have a client of their own"
            )
        self.role = roles[0]
        """The agent that is the policy."""
        self.begun = 0
        """Episodes since the start."""
        self._open = 0
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[None] | None = None

    async def enter(self) -> None:
        """Begin an episode; the first one opens the servers."""
        self.begun += 1
        self._open += 1
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._start())
        await asyncio.shield(self._opening)

    async def _start(self) -> None:
        try:
            await self._stack.enter_async_context(self.env.serving())
        except SystemExit as end:  # it would end the process
            raise RuntimeError(str(end)) from end

    async def leave(self) -> None:
        """End an episode; the last one of a retired environment closes the servers."""
        self._open -= 1
        if not self._open and self.begun >= EPISODES:
            await self.close()

    async def close(self) -> None:
        """Close the servers."""
        await self._stack.aclose()


class Worker:
    """The environments, by their configuration."""

    def __init__(self) -> None:
        self._serving: dict[str, Serving] = {}
        self._tasks: dict[str, list[Task]] = {}

    async def list_tasks(self, config: Json, size: int) -> list[Json]:
        """Return the first tasks: ``name``, and ``prompt`` as text."""
        tasks = self._load(config, size)
        return [{"name": task.data.name or task.data.id or "", "prompt": _prompt_text(task.data)} for task in tasks]

    async def play(self, config: Json, index: int, size: int, url: str, model: str) -> Json:
        """Play an episode on task ``index`` of ``size``, with the policy at ``url``; return reward and metrics, or what failed.

        A failure is ``{"failure"}``, in words.
        """
        import verifiers.v1 as vf

        task = self._load(config, size)[index]
        serving = self._current(config)
        context = vf.ModelContext(model=model, client=vf.EvalClientConfig(base_url=url, api_key_var=_KEY_VARIABLE))
        await serving.enter()
        try:
            (slot,) = serving.env.slots(task)
            episode = await serving.env.run_slot(slot, context)
        finally:
            await serving.leave()
        return _result(episode, serving.role)

    async def close(self) -> None:
        """Close the servers."""
        await asyncio.gather(*(serving.close() for serving in self._serving.values()), return_exceptions=True)

    def _load(self, config: Json, size: int) -> list[Task]:
        key = json.dumps([config, size])
        if key not in self._tasks:
            self._tasks[key] = list(itertools.islice(self._current(config).env.taskset, size))
        return self._tasks[key]

    def _current(self, config: Json) -> Serving:
        key = json.dumps(config)
        if key not in self._serving or self._serving[key].begun >= EPISODES:
            self._serving[key] = Serving(config)
        return self._serving[key]


def _with_module(config: Json) -> Json:
    """Return a configuration whose taskset is a module, where it was a file; it can be imported by its name."""
    path = Path(config["taskset"]["id"])
    if path.suffix != ".py":
        return config
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
        # Tool servers import the module in separate processes.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(path.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    importlib.import_module(path.stem)
    return {**config, "taskset": {**config["taskset"], "id": path.stem}}


def _with_local_runtimes(config: Json) -> Json:
    """Return a configuration whose agents run on this machine, where neither it nor the environment says where."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    fields = env_config_type(config["taskset"]["id"], config.get("id", "")).model_fields
    agents = {
        name: {"runtime": {"type": "subprocess"}, **config.get(name, {})}
        for name, field in fields.items()
        if isinstance(field.default, AgentConfig) and "runtime" not in field.default.model_fields_set
    }
    return {**config, **agents}


def _prompt_text(data: TaskData) -> str:
    prompt = data.prompt
    if isinstance(prompt, list):
        prompt = prompt[-1].content if prompt else ""
    return prompt if isinstance(prompt, str) else ""


def _result(episode: Episode, role: str) -> Json:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    traces = (
        episode.traces if len(episode.traces) == 1 else [trace for trace in episode.traces if trace.agent.name == role]
    )
    if not episode.ok or len(traces) != 1:
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else f"{len(traces)} traces of {role}, and not one"
        stops = ", ".join(str(trace.stop_condition) for trace in episode.traces)
        return {"failure": f"{last} ({stops})"}
    (trace,) = traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    reward = math.fsum(reward.value for reward in trace.rewards.values() if reward is not None)
    if unscored or not trace.rewards or not math.isfinite(reward):
        fault = f"no value of {', '.join(unscored)}" if unscored else f"rewards {trace.rewards}"
        return {"failure": f"scoring returned {fault}"}
    metrics = {f"reward/{name}": value.score for name, value in trace.rewards.items() if value is not None}
    metrics |= {name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)}
    return {"reward": reward, "metrics": metrics}


async def main() -> None:
    """Serve calls until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to standard error
    os.environ[_KEY_VARIABLE] = "in the address"
    # Programs that are installed next to verifiers, such as uv, which starts agents.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        out.write(f"{error}; {sys.executable} has no verifiers from 0.4\n")
        return
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    worker = Worker()
    running: dict[int, asyncio.Task[None]] = {}
    out.write(f"{READY}\n")

    async def answer(number: int, call: str, arguments: Json) -> None:
        try:
            reply = {"value": await getattr(worker, call)(**arguments)}
        except (Exception, SystemExit) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        finally:
            del running[number]
        out.write(json.dumps({"number": number, **reply}) + "\n")

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        number, call = request.pop("number"), request.pop("call")
        if call == "cancel":
            if number in running:
                running[number].cancel()
            continue
        running[number] = asyncio.ensure_future(answer(number, call, request))
    for task in running.values():
        task.cancel()
    if running:
        await asyncio.wait(running.values(), timeout=_END_S)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(main())
