"""Adapter of environments behind OpenEnv's servers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import ClassVar

from typing_extensions import override

from agentrl.adapters.base import ActionError, InvalidTurns, Json, opening, text_after_reasoning
from agentrl.adapters.openenv.actions import TurnActions, observation_text, read_tools, result_text, takes_tools
from agentrl.adapters.openenv.options import OpenEnvOptions
from agentrl.adapters.openenv.server import OpenEnvServer, open_server
from agentrl.adapters.openenv.session import (
    CAPACITY,
    EXECUTION,
    VALIDATION,
    LostSessionError,
    RefusedError,
    Session,
    StepReply,
)
from agentrl.adapters.openenv.task_api import server_tasks
from agentrl.config.validation import parse_section
from agentrl.core.background import run_coroutine
from agentrl.core.env import AsyncEnv, Step
from agentrl.core.errors import EnvironmentFailure, ServiceError
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import Action, CallStatus, Info, Message, Observation, ToolCall

_log = logging.getLogger(__name__)
_FIRST_WAIT_S = 0.5
_NOTHING = "(nothing)"
_full: set[str] = set()
"""Addresses of servers that were reported as full."""


class OpenEnv(AsyncEnv):
    """An environment behind an OpenEnv server: an episode is a session there. Tools of MCP environments are the policy's tools.

    Args:
        url: address of the server.
        options: the others of `OpenEnvOptions`.
    """

    handles_tool_calls: ClassVar[bool] = True

    def __init__(self, url: str, **options: object) -> None:
        """Read the options; the server is first needed by `areset`.

        Raises:
            ConfigError: an option is not valid.
        """
        self._options = parse_section(OpenEnvOptions, {"url": url, **options}, "env.options.")
        self._tools: tuple[Tool, ...] = ()
        self._session: Session | None = None
        self._server: OpenEnvServer | None = None
        self._actions: TurnActions | None = None
        self._invalid = InvalidTurns(self._options.invalid_cost, self._options.max_invalid)
        self._steps = self._replays = 0
        self._parameters: Json = {}
        self._first_reply: StepReply | None = None
        """To the reset."""
        self._history: list[tuple[Json, StepReply | str]] = []
        """Actions of the episode with their replies; a refused one with the code. Only of deterministic environments."""

    @property
    @override
    def tools(self) -> Sequence[Tool]:  # type: ignore[override]
        """Tools of the episode's session."""
        return self._tools

    @classmethod
    @override
    def configured_tasks(cls, split: str, seed: int, options: Mapping[str, object]) -> Sequence[Task]:
        """Return the tasks of the server's Task API; without one 1000, whose seeds decide about the problem.

        Raises:
            MissingError: the server does not answer.
        """
        parsed = parse_section(OpenEnvOptions, options, "env.options.")
        return run_coroutine(server_tasks(parsed, split))

    @classmethod
    @override
    def example_task(cls) -> Task:
        return Task("openenv/example", ())

    @override
    async def areset(self, *, seed: int | None = None, options: Json | None = None) -> tuple[Observation, Info]:
        """Start a session. ``reset`` in the task's metadata has further parameters of the environment's reset."""
        await super().areset(seed=seed, options=options)
        await self.aclose()
        self._steps = self._replays = 0
        self._history = []
        server = open_server(self._options)
        try:
            schema = await server.action_schema()
        except ServiceError as error:
            raise self._failure(str(error)) from None
        is_mcp = takes_tools(schema)
        self._actions = None if is_mcp else TurnActions(schema, self._options.action)
        self._invalid = InvalidTurns(
            self._options.invalid_cost, self._options.max_invalid, "" if self._actions is None else self._actions.rule
        )
        parameters = {"seed": int(self.np_random.integers(2**31)), "episode_id": uuid.uuid4().hex}
        parameters |= self._options.reset | dict(self.task.metadata.get("reset") or {})
        self._parameters = parameters
        await server.acquire()
        self._server = server
        try:
            reply = self._first_reply = await self._open_session()
        except BaseException:
            await self.aclose()
            raise
        if reply.done:
            raise self._failure("the episode is over after its reset")
        prompt = self.task.prompt or ((Message("user", self._options.prompt),) if self._options.prompt else ())
        rule = "" if self._actions is None else self._actions.rule
        text = observation_text(reply.observation, self._options.observation)
        return opening(prompt, rule, text or ("" if prompt else _NOTHING)), {}

    async def _open_session(self) -> StepReply:
        """Open a session and reset it, again while the server is full or not there yet."""
        parameters, is_mcp = self._parameters, self._actions is None
        options, attempt, began = self._options, 1, time.monotonic()
        assert self._server is not None
        while True:
            self._session = self._server.session()
            try:
                if is_mcp:
                    self._tools = read_tools((await self._session.step({"type": "list_tools"})).observation)
                return await self._session.reset(parameters)
            except RefusedError as error:
                waited = time.monotonic() - began
                if error.code != CAPACITY:
                    raise self._failure(f"the server refused the reset: {error}") from None
                if waited >= options.capacity_wait_s:
                    raise self._failure(
                        f"the server is full ({error.message}) for env.options.capacity_wait_s={options.capacity_wait_s:g}; "
                        f"raise its max_concurrent_envs, or lower env.options.concurrency={options.concurrency}"
                    ) from None
                if options.url not in _full:
                    _full.add(options.url)
                    _log.warning("the OpenEnv server at %s is full (%s); episodes wait", options.url, error.message)
            except LostSessionError as error:
                if attempt >= options.attempts:
                    raise self._lost(error, f", at the last of {attempt} attempts") from None
                attempt += 1
            await self._session.close()
            self._session = None
            await asyncio.sleep(_FIRST_WAIT_S * random.uniform(0.5, 1.5) * min(attempt, 8))

    @override
    async def astep(self, action: Action) -> Step:
        """Take the action of a turn, or run its calls of tools."""
        assert isinstance(action, Message), "it requests no tools"
        if self._session is None or self._server is None:
            raise self._failure("step after the end of the episode")
        step = await (self._answer_text(action) if self._actions is not None else self._run_calls(action))
        if step[2] or step[3]:
            await self.aclose()
        return step

    async def _answer_text(self, turn: Message) -> Step:
        assert self._actions is not None
        try:
            reply = await self._step(self._actions.parse(text_after_reasoning(turn)))
        except ActionError as error:
            return self._refuse(str(error))
        except RefusedError as error:
            return self._refuse(error.message)
        self._invalid.end_row()
        message = Message("user", self._text(reply))
        return self._end((message,), reply.reward, reply)

    async def _run_calls(self, turn: Message) -> Step:
        """Run the calls of a turn in order; a turn without calls ends the episode."""
        messages, total, reply = list[Message](), 0.0, None
        for call in turn.tool_calls:
            if reply is not None and reply.done:
                messages.append(_answer(call, "The episode is over."))
                continue
            if call.status is not CallStatus.OK:
                self._invalid.count += 1
                messages.append(_answer(call, call.fault))
                continue
            try:
                reply = await self._step(
                    {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
                )
            except RefusedError as error:
                messages.append(_answer(call, f"Error: {error.message}"))
                continue
            total += reply.reward
            messages.append(_answer(call, result_text(reply.observation)))
        if not turn.tool_calls:
            return (), 0.0, True, False, self._metrics()
        return self._end(tuple(messages), total, reply)

    async def _step(self, action: Json) -> StepReply:
        """Take an action at the server.

        Raises:
            RefusedError: of an action that the policy may correct.
            EnvironmentFailure: anything else went wrong.
        """
        try:
            reply = await self._send(action)
        except RefusedError as error:
            if error.code == VALIDATION or (error.code == EXECUTION and self._options.execution_errors == "show"):
                raise
            hint = "; env.options.execution_errors=show lets the policy read it" if error.code == EXECUTION else ""
            raise self._failure(f"step {self._steps + 1} failed at the server: {error}{hint}") from None
        except LostSessionError as error:
            raise self._lost(error, "") from None
        self._steps += 1
        return reply

    async def _send(self, action: Json) -> StepReply:
        """Send an action; in a new session with the same history, if the environment is deterministic and its session was lost.

        Raises:
            RefusedError: of the action.
            LostSessionError: the session was lost, or as many as ``env.options.attempts``.
            EnvironmentFailure: the new session has another history, or none.
        """
        assert self._session is not None
        is_lost = False
        while True:
            try:
                if is_lost:
                    await self._replay()
                reply = await self._session.step(action)
            except RefusedError as error:
                if self._options.deterministic:
                    self._history.append((action, error.code))
                raise
            except LostSessionError:
                self._replays += 1
                if not self._options.deterministic or self._replays >= self._options.attempts:
                    raise
                is_lost = True
            else:
                if self._options.deterministic:
                    self._history.append((action, reply))
                return reply

    async def _replay(self) -> None:
        """Play the actions so far in a new session.

        Raises:
            LostSessionError: it is lost, too.
            EnvironmentFailure: an action has another result than before.
        """
        if self._session is not None:
            await self._session.close()
        self._parameters |= {"episode_id": uuid.uuid4().hex}
        self._check_replayed("reset", await self._open_session(), self._first_reply)
        assert self._session is not None
        for number, (action, reply) in enumerate(self._history, 1):
            try:
                replayed: StepReply | str = await self._session.step(action)
            except RefusedError as error:
                replayed = error.code
            self._check_replayed(f"action {number}", replayed, reply)

    def _check_replayed(self, request: str, replayed: StepReply | str, reply: StepReply | str | None) -> None:
        if replayed != reply:
            raise self._failure(
                f"its session was lost, and the episode's {request} has another result in a new one: {replayed!r:.200}, not "
                f"{reply!r:.200}; leave out env.options.deterministic"
            )

    def _end(self, messages: tuple[Message, ...], reward: float, reply: StepReply | None) -> Step:
        if reply is None or not reply.done:
            return messages, reward, False, False, {}
        truncated = reply.metadata.get("truncated") is True
        return messages, reward, not truncated, truncated, self._metrics()

    def _refuse(self, fault: str) -> Step:
        message, reward, over = self._invalid.refuse(fault)
        return (message,), reward, over, False, self._metrics() if over else {}

    def _text(self, reply: StepReply) -> str:
        return observation_text(reply.observation, self._options.observation) or _NOTHING

    def _metrics(self) -> Info:
        metrics = {"steps": float(self._steps), "invalid_turns": float(self._invalid.count)}
        return {"metrics": metrics | ({"replays": float(self._replays)} if self._options.deterministic else {})}

    def _lost(self, error: LostSessionError, attempts: str) -> EnvironmentFailure:
        progress = f"after {self._steps} steps" if self._steps else "before the first step"
        return self._failure(
            f"{error}{attempts}, {progress}; does it still run? rollout.failure.environment=retry plays the episode again"
        )

    def _failure(self, fault: str) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"the OpenEnv server env.options.url={self._options.url}, task {self.task.id}: {fault}"
        )

    @override
    async def aclose(self) -> None:
        """End the session, and let another episode have its place."""
        session, self._session = self._session, None
        server, self._server = self._server, None
        if session is not None:
            await session.close()
        if server is not None:
            server.release()


def _answer(call: ToolCall, text: str) -> Message:
    return Message("tool", text, tool_call_id=call.id)
