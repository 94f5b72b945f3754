"""Episodes that are played over the gateway's endpoints in this process, with a scripted policy."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from byte_renderer import byte_renderer

from agentrl import Agent, Message, Rollout, Task
from agentrl.audit.run import rollout_faults
from agentrl.batch.provenance import check_rows
from agentrl.config.agent import AgentConfig
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.lineup import Lineup
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.agent_session import Session
from agentrl.gateway.agent_sessions import AgentSessions
from agentrl.gateway.server import Gateway
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import RecordedRequest, ScriptedSampler

TASK = Task("t", (Message("user", "Where does it lie?"),), answer="Remu")
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def make_test_renderer() -> ChatRenderer:
    """Return a renderer with one token a byte, calls as Hermes writes them, and a template that leaves earlier turns alone."""
    return byte_renderer(CHATML)


@dataclass
class Program:
    """What an agent program has: endpoints, and a key."""

    gateway: Gateway
    key: str
    sessions: AgentSessions
    client: httpx.AsyncClient
    replies: list[httpx.Response] = field(default_factory=list)

    @property
    def session(self) -> Session:
        """Of the only agent, or of the first."""
        return next(iter(self.sessions.by_agent.values()))

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        response = await self.client.post(path, json=body, headers=headers)
        self.replies.append(response)
        return response

    async def chat(
        self, *messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Return the message of a chat completion."""
        response = await self.post(
            "/v1/chat/completions", {"model": "m", "messages": [*messages], **fields}, **(headers or {})
        )
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


class EngineSampler:
    """Samples one episode with an engine, whose prefix cache is empty at the beginning, and records the requests.

    ``gate``, if set, is waited for before a request is sent.
    """

    def __init__(self, url: str, vocabulary: Vocabulary | None = None) -> None:
        self.requests: list[RecordedRequest] = []
        self.generations: list[Generation] = []
        self.gate: asyncio.Event | None = None
        self._url, self._vocabulary = url, vocabulary
        self._client: SGLangClient | None = None
        self._opening = asyncio.Lock()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        self.requests.append(RecordedRequest(prompt, params, session_id, request_id, len(self.requests), policy))
        if self.gate is not None:
            await self.gate.wait()
        async with self._opening:
            if self._client is None:
                self._client = SGLangClient(self._url, timeout_s=300, vocabulary=self._vocabulary)
                await self._client.flush()
        generation = await self._client.generate(
            prompt, params, session_id=session_id, request_id=request_id, policy=policy
        )
        self.generations.append(generation)
        return generation

    async def abort(self, request_id: str) -> None:
        if self._client is not None:
            await self._client.abort(request_id)

    async def close_session(self, session_id: str) -> None:
        """Do nothing: the next episode begins with an empty cache."""

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()


@dataclass
class Played:
    """An episode that has ended."""

    rollouts: list[Rollout]
    sampler: ScriptedSampler | EngineSampler
    replies: list[httpx.Response]
    renderer: ChatRenderer

    @property
    def rollout(self) -> Rollout:
        """The only one."""
        (rollout,) = self.rollouts
        return rollout

    def trained(self) -> list[str]:
        """Return the trained text of each row."""
        return [self.renderer.decode(row.token_ids[row.mask == 1].tolist()) for row in self.rollout.rows]

    def prompts(self) -> list[str]:
        return [self.renderer.decode(request.prompt.token_ids) for request in self.sampler.requests]


Talk = Callable[[Program], Awaitable[object]]
Play = Callable[..., Played]
"""``play(script, talk, **limits)``."""


def play_with(
    renderer: ChatRenderer,
    script: Any,
    talk: Any,
    *,
    gate: asyncio.Event | None = None,
    is_loop: bool = False,
    config: AgentConfig | None = None,
    lineup: Lineup | None = None,
    env: Callable[[], Env] | None = None,
    temperature: float = 1.0,
    **limits: Any,
) -> Played:
    """Play an episode with a coroutine in place of an agent program.

    A loop is a function for ``rollout.generate``. The script may be an `EngineSampler`. ``env`` plays the episode in
    place of the coroutine.
    """
    sampler = script
    if isinstance(script, EngineSampler):
        script.gate = gate
    else:
        sampler = ScriptedSampler(
            script, encode=renderer.encode, end_token_id=renderer.end_token_id, version=7, gate=gate
        )
    replies: list[httpx.Response] = []
    config = config or AgentConfig()

    async def generate(task: Task, agent: Agent) -> list[Rollout]:
        gateway = Gateway(keep_alive_s=0.01)
        transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=True)
        sessions = AgentSessions.open(agent, config)
        async with gateway.open(sessions) as key:
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
                await talk(Program(gateway, key, sessions, client, replies))
        if sessions.failure.done():
            raise sessions.failure.result()
        return sessions.rollouts(agent)

    bounds = {"max_turns": 20, "max_tokens": 8192, "max_seconds": 30.0, "max_new_tokens": 256} | limits
    context = EpisodeContext(
        env_factory=env or Env,
        renderer=renderer,
        sampler=sampler,
        tool_clients={},
        limits=Limits(**bounds),
        sampling=SamplingParams(max_new_tokens=bounds["max_new_tokens"], seed=5, temperature=temperature),
    )
    policy = FailurePolicy(FailureConfig(sampler="drop", max_failed_share=1))
    loop = None if env is not None else talk if is_loop else generate
    settings = EpisodeSettings(context, generate=loop, lineup=lineup)
    runner = EpisodeRunner({"": settings}, policy, EpisodeSlots(4))
    rollouts: list[Rollout] = []

    async def run() -> None:
        try:
            rollouts.extend(await runner.run_many([Job(TASK, 1, "e")]))
        finally:
            if isinstance(sampler, EngineSampler):
                await sampler.aclose()

    asyncio.run(run())  # it would print what the coroutine returns, with all arrays, to look for a signal of that name
    for rollout in rollouts:
        if rollout.failure is None:
            check_rows(rollout.rows)
            assert rollout_faults(rollout) == []
    return Played(rollouts, sampler, replies, renderer)


def sampled(texts: Sequence[str]) -> str:
    """Return what is trained of turns with these texts."""
    return "".join(f"{text}<|im_end|>" for text in texts)
