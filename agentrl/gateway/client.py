"""A client for applications that are the agent of a run (``rollout.agent.port``), wherever they run.

::

    client = AgentClient("http://127.0.0.1:8100")
    while (session := client.start()) is not None:
        with session:
            openai = OpenAI(base_url=session.openai_base_url, api_key=session.key)
            reply = openai.chat.completions.create(model=session.model, messages=session.task["prompt"])
            session.end(reward=score(reply))
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from agentrl.gateway.variables import session_variables

TOKEN_VARIABLE = "AGENTRL_AGENT_TOKEN"
"""Environment variable with the token that a run requires at addresses other than the loopback."""
_WAIT_S = 30.0
"""Seconds that a request waits at the run for an episode."""
_TIMEOUT_S = 60.0


class AgentClient:
    """Starts sessions at a run. Threads may share it.

    Args:
        url: of the run, such as ``http://127.0.0.1:8100``.
        token: by default ``AGENTRL_AGENT_TOKEN``.
        patience_s: seconds in which a request is repeated while the run cannot be reached; no request counts twice.
        transport: of httpx, such as one with other certificates.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        patience_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self._patience_s = patience_s
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S, transport=transport)

    def start(
        self, task: Mapping[str, object] | None = None, *, source: str | None = None, wait_s: float = math.inf
    ) -> AgentSession | None:
        """Wait for an episode, and return its session; None: the run is over.

        Args:
            task: that the application brings, with ``rollout.agent.tasks=application``: ``id``, and if you like ``prompt`` (a
                text or messages; their contents may be lists of OpenAI's parts ``text`` and ``image_url``, with ``data:`` URLs),
                ``answer`` and ``metadata`` for the reward function. Sessions with the same id are samples of one group, whose
                task is that of the first.
            source: of a mixed run, whose tasks alone are played.
            wait_s: seconds to wait; by default until the run is over.

        Raises:
            TimeoutError: no episode waited within ``wait_s``.
            httpx.TransportError: the run cannot be reached.
            httpx.HTTPStatusError: it refuses, such as a wrong token.
        """
        end = time.monotonic() + wait_s
        body: dict[str, object] = {"source": source} | ({} if task is None else {"task": task})
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        while True:
            wait = min(_WAIT_S, max(0.0, end - time.monotonic()))
            response = self._post("/v1/sessions", {**body, "wait_s": wait}, headers)
            if response.status_code == httpx.codes.GONE:
                return None
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                _check(response)
                return AgentSession(self, **response.json())
            retry_after_s = float(response.headers.get("Retry-After", "1"))
            if time.monotonic() + retry_after_s >= end:
                raise TimeoutError(f"no episode within wait_s={wait_s:g}: {response.text:.1000}")
            time.sleep(retry_after_s)

    def post(self, path: str, key: str, body: Mapping[str, object]) -> None:
        """Post to a session's own path.

        Raises:
            httpx.TransportError: the run cannot be reached.
            httpx.HTTPStatusError: it refuses; 410 if the session is over.
        """
        _check(self._post(path, body, {"Authorization": f"Bearer {key}"}))

    def _post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str]) -> httpx.Response:
        end = time.monotonic() + self._patience_s
        while True:
            try:
                return self._http.post(path, json=body, headers=headers)
            except httpx.TransportError:
                if time.monotonic() >= end:
                    raise
            time.sleep(1.0)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


@dataclass(eq=False)
class AgentSession:
    """An episode that this application plays. As a context it is ended as a failure by what its body raises."""

    client: AgentClient = field(repr=False)
    """That has started it."""
    id: str
    """Id of the episode: step, task in the step and sample in a training step, such as ``3/0/1``."""
    key: str = field(repr=False)
    """The API key of its calls."""
    task: dict[str, Any]
    """``id``, ``prompt`` (messages) and ``metadata``; the right answer is not in it."""
    source: str
    """Source of the task in a mixed run; else empty."""
    prompt: str
    """``rollout.agent.prompt`` with the task's last message."""
    model: str
    """The name of the policy; of several agents, that of the first."""
    models: list[str]
    """The names of all agents, in the order of seats."""
    openai_base_url: str
    """For OpenAI's chat completions and Responses."""
    anthropic_base_url: str
    """For Anthropic's Messages."""
    session_url: str
    """Has the key in it, for clients that send none."""
    is_ended: bool = False
    """Whether `end` was called."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which programs on the SDKs of OpenAI and Anthropic find the policy."""
        return session_variables(self.anthropic_base_url, self.key, self.model)

    def reward(self, reward: float, metrics: Mapping[str, float] | None = None, *, agent: str | None = None) -> None:
        """Set the reward, with ``rollout.agent.reward=session``; the last one counts.

        Args:
            reward: of the rollout.
            metrics: averaged over rollouts and logged.
            agent: of several agents, the one whose rollout it is; None: of all.

        Raises:
            httpx.HTTPStatusError: the run refuses it, or the session is over.
        """
        body = {"reward": reward, "metrics": dict(metrics or {}), "agent": agent}
        self.client.post("/v1/session/reward", self.key, body)

    def end(
        self,
        reward: float | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        answer: str | None = None,
        result: object = None,
        failure: str = "",
    ) -> None:
        """End the episode.

        Args:
            reward: with ``rollout.agent.reward=session``, unless `reward` has set it.
            metrics: averaged over rollouts and logged.
            answer: the final answer, as ``sample.final``, and for ``rollout.agent.reward=environment``; None: the policy's last
                turn.
            result: for the reward function, as JSON: ``sample.metadata["agent_result"]``.
            failure: why the episode is none, which is not the policy's fault; ``rollout.failure.agent`` decides what follows.

        Raises:
            httpx.HTTPStatusError: the run refuses it, or the session is over.
        """
        body = {
            "reward": reward,
            "metrics": dict(metrics or {}),
            "answer": answer,
            "result": result,
            "failure": failure,
        }
        self.client.post("/v1/session/end", self.key, body)
        self.is_ended = True

    def __enter__(self) -> AgentSession:
        """Return the session."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the episode: as a failure after an error, else as it is if `end` was not called."""
        if self.is_ended:
            return
        if error is None:
            self.end()
            return
        try:
            self.end(failure=f"{type(error).__name__}: {error}")
        except httpx.HTTPError as refusal:
            error.add_note(f"The session {self.id} could not be ended: {refusal}")


def _check(response: httpx.Response) -> None:
    """Check that a request was accepted.

    Raises:
        httpx.HTTPStatusError: with the message of the run.
    """
    if response.is_success:
        return
    message = f"{response.status_code} of {response.url.path}: {response.text:.1000}"
    raise httpx.HTTPStatusError(message, request=response.request, response=response)
