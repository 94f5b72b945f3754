"""A sampler with scripted answers, and episodes that are played with it."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.extras import require
from agentrl.core.registry import TOOLS, names
from agentrl.core.task import Task
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import FinishReason, Generation, Prompt, Rollout, SamplingParams
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.toolserver.service import find_service


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request to a `ScriptedSampler`."""

    prompt: Prompt
    """Token ids to continue."""
    params: SamplingParams
    """Sampling parameters."""
    session_id: str
    """Id of the episode's session."""
    request_id: str
    """Id of the request."""
    turn: int
    """Index of the request in its session, from 0."""
    policy: str = "main"
    """Name of the requested policy."""


Answer = str | Sequence[int] | Exception
"""Text to encode, token ids, or an error to raise."""

Script = Callable[[RecordedRequest], Answer] | Sequence[Answer] | Mapping[str, Sequence[Answer]]
"""A function, or the answers of a session's turns in order (for all sessions alike, or by session id)."""


class ScriptedSampler:
    """Implements `agentrl.core.sampler.Sampler` without a model.

    The end token is appended to a text that does not end with one of the request's stop strings, as a policy would have to
    sample it. Log-probabilities are drawn from a generator seeded by session and turn: they do not depend on the order of
    requests.

    Example::

        sampler = ScriptedSampler(["<search> Sadova </search>", "<answer> Remu </answer>"], encode=tokenizer.encode)
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        end_token_id: int | None = None,
        version: int = 0,
        seed: int = 0,
        gate: asyncio.Event | None = None,
    ) -> None:
        """Answer requests from ``script``.

        Args:
            script: the answers.
            encode: turns text answers into ids; needed if the script has text.
            end_token_id: ends text answers without a stop string; None adds nothing.
            version: the policy version of the answers; may be changed at any time.
            seed: seed of the log-probabilities.
            gate: requests wait for this event; a request that is aborted meanwhile returns the first half of its tokens.
        """
        self.version = version
        self.gate = gate
        self.requests: list[RecordedRequest] = []
        self.closed: list[str] = []
        self.running = 0
        self.max_running = 0
        self._script = script
        self._encode = encode
        self._end_token_id = end_token_id
        self._seed = seed
        self._turns: Counter[str] = Counter()
        self._aborts: dict[str, asyncio.Event] = {}

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Return the script's answer.

        Raises:
            Exception: the script has one as this answer.
            AssertionError: the script has no answer left for this session.
        """
        request = RecordedRequest(prompt, params, session_id, request_id, self._turns[session_id], policy)
        self._turns[session_id] += 1
        self.requests.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            aborted = await self._wait(request_id)
        finally:
            self.running -= 1
        return self._generation(request, aborted)

    async def _wait(self, request_id: str) -> bool:
        if self.gate is None:
            await asyncio.sleep(0)
            return False
        abort = self._aborts[request_id] = asyncio.Event()
        waits = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(abort.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            del self._aborts[request_id]
        return abort.is_set()

    def _generation(self, request: RecordedRequest, aborted: bool) -> Generation:
        answer = self._answer(request)
        if isinstance(answer, Exception):
            raise answer
        ids = self._ids(answer, request.params)
        reason = FinishReason.STOP
        if aborted:
            ids, reason = ids[: len(ids) // 2], FinishReason.ABORT
        elif len(ids) > request.params.max_new_tokens:
            ids, reason = ids[: request.params.max_new_tokens], FinishReason.LENGTH
        rng = np.random.default_rng([self._seed, zlib.crc32(request.session_id.encode()), request.turn])
        logprobs = tuple(rng.uniform(-2.0, 0.0, len(ids)).tolist())
        return Generation(ids, logprobs, reason, ((0, self.version),), 0, request.request_id)

    def _answer(self, request: RecordedRequest) -> Answer:
        if callable(self._script):
            return self._script(request)
        script = self._script[request.session_id] if isinstance(self._script, Mapping) else self._script
        assert request.turn < len(script), (
            f"the script has {len(script)} answers; session {request.session_id} wants more"
        )
        return script[request.turn]

    def _ids(self, answer: str | Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        if not isinstance(answer, str):
            return tuple(answer)
        assert self._encode is not None, "a script of texts needs encode="
        ids = tuple(self._encode(answer))
        ends = self._end_token_id is None or any(answer.endswith(stop) for stop in params.stop)
        return ids if ends else (*ids, int(self._end_token_id or 0))

    async def abort(self, request_id: str) -> None:
        """Stop a request that waits for the gate; all others have ended."""
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def close_session(self, session_id: str) -> None:
        """Append the session to ``closed``."""
        self.closed.append(session_id)


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

    renderer = load_renderer(resolve_model(model), trust_remote_code=False)
    stop = dict.fromkeys(("sampler", "environment", "tool", "sandbox", "task"), "stop")
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=env_factory,
                    renderer=renderer,
                    sampler=ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id),
                    tool_clients=tool_clients or {},
                    served={tool.name: tool for name in tool_clients or {} for tool in _server_tools(name)},
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


def _server_tools(name: str) -> Sequence[Tool]:
    """Return what a policy may call at a registered tool's server with its default options; a client may be of another name."""
    return find_service(name).tools({}) if name in names(TOOLS) else ()
