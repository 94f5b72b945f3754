"""Adapter of NeMo Gym's resource servers: a session for each episode, tools by route, the reward by verification."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary

from typing_extensions import override

from agentrl.adapters.base import Json, text_after_reasoning
from agentrl.adapters.nemo_gym.options import NemoGymOptions
from agentrl.adapters.nemo_gym.rows import ROW, Response, RowTasks, row_task, row_tools
from agentrl.clients.http import ServiceClient, UnusableReplyError
from agentrl.config.validation import parse_section
from agentrl.core.env import AsyncEnv, Step
from agentrl.core.errors import ConfigError, EnvironmentFailure, ServiceError, unknown_name
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import Action, CallStatus, Info, Message, Observation, ToolCall
from agentrl.core.user_code import is_finite

KEY = "env.options"
_LOST = (502, 503, 504)
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, ServiceClient]] = WeakKeyDictionary()


class NemoGymEnv(AsyncEnv):
    """A row of NeMo Gym: the policy calls the tools of a resource server, which verifies the episode.

    Args:
        url: address of the server.
        options: the others of `NemoGymOptions`.
    """

    handles_tool_calls: ClassVar[bool] = True

    def __init__(self, url: str, **options: object) -> None:
        """Read the options; the server is first needed by `areset`.

        Raises:
            ConfigError: an option is not valid.
        """
        self._options = parse_section(NemoGymOptions, {"url": url, **options}, f"{KEY}.")
        self._tools: tuple[Tool, ...] = ()
        self._client: ServiceClient | None = None
        self._cookies: dict[str, str] = {}
        self._response: Response | None = None
        self._turns = self._calls = self._faulty_calls = 0

    @property
    @override
    def tools(self) -> Sequence[Tool]:  # type: ignore[override]
        """Functions that the task's row offers."""
        return self._tools

    @classmethod
    @override
    def configured_tasks(cls, split: str, seed: int, options: Mapping[str, object]) -> Sequence[Task]:
        """Return the rows of ``env.options.rows`` for the split; none for ``eval`` if it has no file.

        Raises:
            ConfigError: it has no file for the split, or the file has no rows.
        """
        files = parse_section(NemoGymOptions, options, f"{KEY}.").rows
        if split not in files:
            if split == "eval":
                return ()
            raise unknown_name("split of rows", split, files, f"{KEY}.rows")
        return RowTasks(split, Path(files[split]))

    @classmethod
    @override
    def example_task(cls) -> Task:
        return row_task("nemo_gym/example", {"responses_create_params": {"input": "Say hello.", "tools": []}})

    @override
    async def areset(self, *, seed: int | None = None, options: Json | None = None) -> tuple[Observation, Info]:
        """Start a session for the task's row."""
        await super().areset(seed=seed, options=options)
        row = self.task.metadata.get(ROW)
        if not isinstance(row, dict):
            raise ConfigError(
                f"task {self.task.id} has no row of NeMo Gym; set {KEY}.rows={{train: FILE.jsonl}}, and leave out data.path"
            )
        self._tools = row_tools(row)
        self._response = Response(row)
        self._cookies = {}
        self._turns = self._calls = self._faulty_calls = 0
        self._client = _open_client(self._options)
        try:
            await self._client.post("/seed_session", row, _read_object, cookies=self._cookies)
        except ServiceError as error:
            raise self._failure(f"the session did not start: {error}") from None
        return self.task.prompt, {}

    @override
    async def astep(self, action: Action) -> Step:
        """Run the calls of a turn; without calls, or after ``max_steps``, the episode is verified."""
        assert isinstance(action, Message), "it requests no tools"
        if self._response is None:
            raise self._failure("step after the end of the episode")
        self._turns += 1
        text = text_after_reasoning(action)
        if text or not action.tool_calls:
            self._response.add_turn(text)
        messages = []
        for call in action.tool_calls:
            result = await self._call(call)
            self._response.add_call(call, result)
            messages.append(Message("tool", result, tool_call_id=call.id))
        is_cut = bool(action.tool_calls) and self._turns == self._options.max_steps
        if action.tool_calls and not is_cut:
            return tuple(messages), 0.0, False, False, {}
        reward, metrics = await self._verify(self._response, is_cut)
        self._response = None
        return tuple(messages), reward, not is_cut, is_cut, {"metrics": metrics}

    @override
    async def atruncate(self) -> tuple[float, Info]:
        """Verify the episode as it is, incomplete: the run's limits end it before a turn without calls."""
        response, self._response = self._response, None
        if response is None or not self._turns:
            return 0.0, {}
        reward, metrics = await self._verify(response, is_cut=True)
        return reward, {"metrics": metrics}

    async def _call(self, call: ToolCall) -> str:
        """Return the reply of a tool's route: its text, also that of an error, which the policy may correct."""
        assert self._client is not None
        if call.status is not CallStatus.OK:
            self._faulty_calls += 1
            return call.fault
        self._calls += 1
        try:
            status, text = await self._client.exchange(f"/{call.name}", dict(call.arguments), cookies=self._cookies)
        except ServiceError as error:
            raise self._failure(f"the tool {call.name} failed: {error}") from None
        if status in _LOST or (status >= 500 and self._options.tool_errors == "fail"):
            raise self._failure(f"the tool {call.name} failed: HTTP {status}: {text:.300}")
        self._faulty_calls += status >= 400
        return text

    async def _verify(self, response: Response, is_cut: bool) -> tuple[float, dict[str, float]]:
        assert self._client is not None
        try:
            verdict = await self._client.post(
                "/verify", response.verification(is_cut), _read_verdict, cookies=self._cookies
            )
        except ServiceError as error:
            raise self._failure(f"the episode was not verified: {error}") from None
        if verdict.get("mask_sample") is True:
            kind, reason = verdict.get("failure_kind"), verdict.get("failure_reason")
            raise self._failure(
                f"the server says that its reward measures nothing: {kind or 'no kind'}: {reason or 'no reason'}"
            )
        metrics = {"turns": self._turns, "calls": self._calls, "faulty_calls": self._faulty_calls}
        components = verdict.get("reward_components")
        metrics |= components if isinstance(components, dict) else {}
        return float(verdict["reward"]), {str(name): float(value) for name, value in metrics.items()}

    def _failure(self, fault: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"the NeMo Gym server {KEY}.url={self._options.url}, task {self.task.id}: {fault}")


def _open_client(options: NemoGymOptions) -> ServiceClient:
    """Return the client of a server in the running event loop; the same one for equal options."""
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    name = options.model_dump_json()
    if name not in clients:
        clients[name] = ServiceClient(options, KEY)
    return clients[name]


def _read_object(reply: object) -> Json:
    if not isinstance(reply, dict):
        raise UnusableReplyError(f"a reply that is no object: {reply!r:.200}")
    return reply


def _read_verdict(reply: object) -> Json:
    verdict = _read_object(reply)
    reward = verdict.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not is_finite(reward):
        raise UnusableReplyError(f"a reply without a finite reward: {reply!r:.200}")
    return verdict
