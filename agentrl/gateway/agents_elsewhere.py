"""Agents that run elsewhere: they start a session for each episode over HTTP, play it, and end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import override

from agentrl.config.agent import AgentConfig
from agentrl.core.background import first_ended
from agentrl.core.errors import AgentProgramError
from agentrl.core.task import Task
from agentrl.core.types import Rollout, json_state
from agentrl.data.application_tasks import APPLICATION_TASK, is_placeholder
from agentrl.episode.chat import Agent
from agentrl.episode.env_steps import AnswerScoring
from agentrl.gateway.agent_loop import AgentLoop, describe_wait, late, time_left
from agentrl.gateway.agent_sessions import AgentEnd, AgentSessions
from agentrl.gateway.application_groups import TaskBody, TaskGroup, TaskGroups
from agentrl.gateway.dialects.base import BadRequestError, Json, OpenAiErrors, convert
from agentrl.gateway.http_messages import (
    CLOSED_REQUEST,
    json_reply,
    read_body,
    read_object,
    wait_for_disconnect,
)
from agentrl.gateway.program_process import plain_messages, program_prompt
from agentrl.gateway.server import KEEP_ALIVE_S, Gateway, make_key
from agentrl.gateway.session_routes import MAX_WAIT_S
from agentrl.obs.waiting import waiting
from agentrl.toolserver.server.auth import other_origin, required_token, token_required

KEY = "rollout.agent"
TOKEN_VARIABLE = "AGENTRL_AGENT_TOKEN"
"""Environment variable with the bearer token that starts of sessions need; the loopback needs none."""
SESSIONS_PATH = "/v1/sessions"
RESULT = "agent_result"
"""Key of `Rollout.metadata` with what the agent has left for the reward function; see `AgentEnd.result`."""
_STARTS = 1024
"""Starts that are kept for retries."""
_RETRY_AFTER_S = 1
_FAILURE_CHARACTERS = 1000


class _StartBody(msgspec.Struct):
    """``POST /v1/sessions``."""

    wait_s: float = 30.0
    source: str | None = None
    task: TaskBody | None = None


@dataclass(slots=True, eq=False)
class _WaitingEpisode:
    """An episode that waits for an agent."""

    config: AgentConfig
    task: Task
    source: str
    agent: Agent
    """Agent of the episode; gets the task that a session brings."""
    group: TaskGroup | None = None
    """That of its task, if the agent brings it; ``task`` is a placeholder then."""
    limit: asyncio.TimerHandle | None = None
    """Fails it if no session takes it in time, once its group has a task."""
    key: str = field(default_factory=make_key)
    models: list[str] = field(default_factory=list)
    """Names of the policy, or of the agents, once its sessions are open."""
    taken: asyncio.Future[Task] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Its task, when an agent takes it."""
    opened: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Whether its sessions have been opened; False if the episode was cancelled before."""


def agent_token(config: AgentConfig) -> str | None:
    """Return the token that starts of sessions need; None if they need none.

    Raises:
        ConfigError: the address can be reached from other machines and there is no token, or it can be guessed.
    """
    return required_token(None, config.host, key=None, variable=TOKEN_VARIABLE, host_option=f"{KEY}.host=")


class AgentsElsewhere:
    """The address at which agents start sessions, and the episodes that wait for them; one in a run.

    Args:
        config: has the address.
        keep_alive_s: see `KEEP_ALIVE_S`.

    Raises:
        ConfigError: see `agent_token`.
    """

    def __init__(self, config: AgentConfig, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        assert config.port is not None, "the agent runs elsewhere"
        token = agent_token(config)
        self._refuse = (
            partial(other_origin, setting=TOKEN_VARIABLE) if token is None else token_required(token, TOKEN_VARIABLE)
        )
        self.gateway = Gateway(
            config.host,
            config.port,
            keys=f"{KEY}.port (--port of agentrl gateway), {KEY}.host (--host)",
            keep_alive_s=keep_alive_s,
            routes=[Route(SESSIONS_PATH, self._handle, methods=["POST"])],
        )
        """The endpoints of the sessions."""
        self._waiting: list[_WaitingEpisode] = []
        self._groups = TaskGroups()
        self._changed = asyncio.Event()  # replaced each time that it is set
        self.standing_key = ""
        """With it an episode is always open, without a start: when that has ended, the next one takes its place."""
        self.needs_reward = True
        """Whether, with ``rollout.agent.reward=session``, an episode without a reward cannot be ended."""
        self._standing: _WaitingEpisode | None = None  # has the standing key
        self._open: set[AgentSessions] = set()
        self._is_over = False
        self._replies: dict[str, Json] = {}  # of starts, by Idempotency-Key
        self._requests: dict[
            str, asyncio.Event
        ] = {}  # starts that wait, by Idempotency-Key: set when another replaces it

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen until the end of the context, and yield the address; then waiting agents are notified that the run is over.

        Raises:
            PortInUseError: another process has the port.
            ConfigError: this machine does not have the address.
        """
        async with self.gateway.serving() as url:
            try:
                yield url
            finally:
                self._is_over = True
                self._notify()

    @asynccontextmanager
    async def sessions(
        self, config: AgentConfig, task: Task, source: str, agent: Agent, samples: int
    ) -> AsyncIterator[AgentSessions]:
        """Wait until an agent takes an episode, and yield its sessions.

        Args:
            config: of the agent.
            task: of the episode; of a placeholder the agent brings what it is, and ``agent`` gets it.
            source: of the task; empty in a run with one environment.
            agent: of the episode.
            samples: episodes of the task.

        Raises:
            AgentProgramError: `end_all` was called before an agent took it, or no session took this sample of a task that the
                agent has brought.
        """
        episode = _WaitingEpisode(config, task, source, agent)
        if is_placeholder(task):
            episode.group = self._groups.find(agent.state, source, samples)
        self._waiting.append(episode)
        self._limit_wait(episode)
        self._give_standing_key()
        self._notify()
        sessions: AgentSessions | None = None
        try:
            with agent.clock.pause(), waiting("agent", lambda: self._describe_wait(episode)):
                agent.set_task(await episode.taken)
            agent.begin_time()
            sessions = AgentSessions.open(agent, config)
            sessions.may_end = True
            sessions.needs_reward = sessions.may_reward and self.needs_reward
            async with self.gateway.open(sessions, episode.key):
                self._open.add(sessions)
                episode.models = sessions.models
                episode.opened.set_result(True)
                yield sessions
        finally:
            if episode in self._waiting:
                self._waiting.remove(episode)
                self._settle(episode)
            if not episode.opened.done():
                episode.opened.set_result(False)
            if episode is self._standing:
                self._standing = None
                if (following := self._give_standing_key()) is not None:
                    await following.opened
            if sessions is not None:
                self._open.discard(sessions)
                sessions.over.set()

    def end_all(self) -> None:
        """End all open episodes, as their agents would; those that wait for an agent fail."""
        for sessions in self._open:
            if not sessions.ended.done():
                sessions.end(AgentEnd(), None)
        for episode in self._waiting:
            episode.taken.set_exception(AgentProgramError("no agent has taken it"))

    def _give_standing_key(self) -> _WaitingEpisode | None:
        """Give the standing key, if no episode has it, to one that waits, and return that."""
        if not self.standing_key or self._standing is not None or not self._waiting:
            return None
        self._standing = episode = self._waiting[0]
        episode.key = self.standing_key
        self._give(episode)
        return episode

    def _give(self, episode: _WaitingEpisode) -> None:
        """Let an episode begin: an agent takes it."""
        self._waiting.remove(episode)
        episode.taken.set_result(episode.task if episode.group is None else episode.group.task or episode.task)
        self._settle(episode)

    def _settle(self, episode: _WaitingEpisode) -> None:
        """Record that an episode waits no longer for a session."""
        if episode.limit is not None:
            episode.limit.cancel()
        if episode.group is not None:
            self._groups.settle(episode.group, episode.agent.state.rollout_id)
            self._notify()  # with the last sample of a task the next session of the same id begins another group

    def _limit_wait(self, episode: _WaitingEpisode) -> None:
        """Have an episode fail that no session takes, once one has brought the task of its group."""
        if episode.group is not None and episode.group.task is not None:
            loop, max_seconds = asyncio.get_running_loop(), episode.agent.clock.seconds
            episode.limit = loop.call_later(max_seconds, self._give_up, episode, episode.group, episode.group.task)

    def _give_up(self, episode: _WaitingEpisode, group: TaskGroup, task: Task) -> None:
        """Fail an episode that no session has taken, as a rollout of the task that the agent has brought."""
        if episode.taken.done():
            return
        self._waiting.remove(episode)
        self._settle(episode)
        episode.agent.set_task(task)
        fault = (
            f"no session took this sample of the task {group.name!r} within rollout.max_seconds="
            f"{episode.agent.clock.seconds:g} of the first; a group has rollout.n_samples_per_prompt={group.samples}"
        )
        episode.taken.set_exception(AgentProgramError(f"{KEY}.tasks=application: {fault}"))

    def _choose(self, body: _StartBody) -> _WaitingEpisode | None:
        """Return the episode for a start: the oldest that waits, for a task of the agent in the group that has it or is free.

        None: there is none now.
        """
        waiting = [episode for episode in self._waiting if body.source in (None, episode.source)]
        if body.task is None:
            return next((episode for episode in waiting if episode.group is None), None)
        groups = [(episode, group) for episode in waiting if (group := episode.group) is not None]
        for episode, group in groups:
            if group.task is not None and group.name == body.task.id:
                return episode
        if self._groups.incomplete(body.task.id, body.source) is not None:
            return None  # its other samples have no slot yet
        for episode, group in groups:
            if group.task is None:
                self._groups.begin(group, episode.task, body.task)
                for sample, sample_group in groups:
                    if sample_group is group:
                        self._limit_wait(sample)
                return episode
        return None

    def _describe_wait(self, episode: _WaitingEpisode) -> str:
        """Return what an episode waits for, and what can be changed."""
        start = f"POST {self.gateway.url}{SESSIONS_PATH}"
        if episode.group is None:
            return f"elsewhere, to begin: no session takes the task {episode.task.id!r} ({start})"
        if episode.group.task is None:
            return f'elsewhere, to bring a task: {start} {{"task": {{"id": …}}}}'
        return (
            f"elsewhere, to take another sample of its task {episode.group.name!r} ({start}), at most "
            f"rollout.max_seconds={episode.agent.clock.seconds:g}"
        )

    def _nothing_waits(self, body: _StartBody) -> str:
        """Return why a start gets no episode."""
        groups = [episode.group is not None for episode in self._waiting if body.source in (None, episode.source)]
        if body.task is None and any(groups):
            return (
                f"this run trains on the tasks of its agent ({KEY}.tasks=application), and no other episode waits: send "
                '{"task": {"id": …}}'
            )
        if body.task is not None and groups and not any(groups):
            return f"the episodes that wait have tasks of the run; {KEY}.tasks=application trains on those of its agent"
        return "no episode waits for an agent; ask again"

    def _notify(self) -> None:
        """Wake the requests that wait for an episode."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _handle(self, http: Request) -> Response:
        try:
            return self._refuse(SESSIONS_PATH, http.headers) or await self._start(http)
        except BadRequestError as error:
            headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.status == 429 else None
            return json_reply(OpenAiErrors().error(error.message, error.status), error.status, headers)
        except ClientDisconnect:
            return Response(status_code=CLOSED_REQUEST)

    async def _start(self, http: Request) -> Response:
        """Open a session for an episode that waits, the oldest first."""
        body = convert(read_object(await read_body(http) or b"{}"), _StartBody)
        if body.task is not None:
            body.task.check()
        if not 0 <= body.wait_s <= MAX_WAIT_S:
            raise BadRequestError(f"wait_s={body.wait_s} is not within 0 and {MAX_WAIT_S:g}")
        key, replaced = http.headers.get("idempotency-key", ""), asyncio.Event()
        if key:
            if (earlier := self._requests.get(key)) is not None:
                earlier.set()  # its client has sent it again
            self._requests[key] = replaced
        try:
            reply = self._replies.get(key) or await self._take(body, http, replaced)
        finally:
            if self._requests.get(key) is replaced:
                del self._requests[key]
        if key:
            self._replies[key] = reply
            if len(self._replies) > _STARTS:
                del self._replies[next(iter(self._replies))]
        address = str(http.base_url).rstrip("/")
        urls = {
            "openai_base_url": f"{address}/v1",
            "anthropic_base_url": address,
            "session_url": f"{address}/s/{reply['key']}/v1",
        }
        return json_reply({**reply, **urls})

    async def _take(self, body: _StartBody, http: Request, replaced: asyncio.Event) -> Json:
        """Wait for an episode, and return what its agent must know.

        Raises:
            BadRequestError: there is none within the time, the run is over, or the request was sent again.
            ClientDisconnect: the client has closed the connection.
        """
        disconnect = asyncio.ensure_future(wait_for_disconnect(http))
        end = asyncio.get_running_loop().time() + body.wait_s
        try:
            while True:
                changed, left_s = self._changed, end - asyncio.get_running_loop().time()
                if self._is_over:
                    raise BadRequestError("the run is over", 410)
                if disconnect.done():
                    raise ClientDisconnect
                if replaced.is_set():
                    raise BadRequestError("this start was sent again with its Idempotency-Key", 409)
                if (episode := self._choose(body)) is not None:
                    self._give(episode)
                    if await episode.opened:
                        return _describe(episode)
                elif left_s <= 0:
                    raise BadRequestError(self._nothing_waits(body), 429)
                else:
                    async with first_ended(
                        changed.wait(), replaced.wait(), asyncio.shield(disconnect), asyncio.sleep(left_s)
                    ):
                        pass
        finally:
            disconnect.cancel()


def _describe(episode: _WaitingEpisode) -> Json:
    task, name, metadata = episode.agent.task, episode.task.id, dict(episode.agent.task.metadata)
    if episode.group is not None:
        name = metadata.pop(APPLICATION_TASK)
    return {
        "id": episode.agent.episode_id,
        "key": episode.key,
        "task": {"id": name, "prompt": plain_messages(task.prompt), "metadata": json_state(metadata)},
        "source": episode.source,
        "prompt": program_prompt(episode.config, task.question),
        "model": episode.models[0],
        "models": episode.models,
    }


class AgentElsewhere(AgentLoop):
    """Plays episodes with agents that run elsewhere.

    Args:
        config: of the agent.
        source: of the tasks; empty in a run with one environment.
        agents: has the address.
        samples: episodes of a task in training.
    """

    def __init__(self, config: AgentConfig, source: str, agents: AgentsElsewhere, samples: int = 1) -> None:
        super().__init__(config)
        self._source, self._agents, self._samples = source, agents, samples

    @override
    async def run(self, task: Task, agent: Agent, scoring: AnswerScoring | None) -> list[Rollout]:
        async with self._agents.sessions(self.config, task, self._source, agent, self._samples) as sessions:
            with waiting(
                "agent", "elsewhere", lambda: describe_wait(sessions, agent.clock, self.config.idle_timeout_s)
            ):
                sessions.fault = await self._wait(sessions, agent)
        self.check(sessions)
        end = sessions.ended.result()
        answer = sessions.last_message() if end.answer is None else end.answer
        metadata = {} if end.result is None else {RESULT: end.result}
        rollouts = await self.finish(sessions, agent, scoring, answer, metadata)
        for rollout in rollouts:
            rollout.metrics = {**rollout.metrics, **end.metrics}
        return rollouts

    async def _wait(self, sessions: AgentSessions, agent: Agent) -> str:
        """Wait for the end of an episode, or of its time; return what is wrong with it, or nothing."""
        idle_timeout_s = self.config.idle_timeout_s
        ends: set[asyncio.Future[Any]] = {sessions.ended, sessions.failure}
        while True:
            left_s = time_left(agent.clock)
            if left_s <= 0:
                return f"{late(agent.clock)}; its last request was {sessions.idle_s:.0f} s before"
            if idle_timeout_s is not None:
                if sessions.idle_s >= idle_timeout_s:
                    return f"sent no request for {KEY}.idle_timeout_s={idle_timeout_s:g}"
                left_s = min(left_s, idle_timeout_s - sessions.idle_s)
            # The clock stands still while engines sample, so that there may be time left then.
            await asyncio.wait(ends, timeout=max(0.05, left_s), return_when=asyncio.FIRST_COMPLETED)
            if sessions.failure.done():
                return f"failed: {sessions.failure.result()}"[:_FAILURE_CHARACTERS]
            if sessions.ended.done():
                failure = sessions.ended.result().failure[:_FAILURE_CHARACTERS]
                return f"reported a failure: {failure}" if failure and not sessions.at_limit else ""
