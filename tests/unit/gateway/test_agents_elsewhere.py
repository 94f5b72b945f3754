"""Agents that run elsewhere: they start sessions, play the episodes that wait, and end them; a real server and its client."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from deadlines import until
from gateway_episodes import TASK

from agentrl import Rollout
from agentrl.config.agent import AgentConfig
from agentrl.config.checks import check
from agentrl.config.load import load_config
from agentrl.config.recorded import SAMPLED, changed_keys, recorded_keys
from agentrl.config.rollout import FailureConfig
from agentrl.config.runners import runner_count
from agentrl.config.schema import Config
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, PortInUseError, SamplerError
from agentrl.core.types import ANSWER, FailureKind, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.agents_elsewhere import TOKEN_VARIABLE, AgentElsewhere, AgentsElsewhere, agent_token
from agentrl.gateway.client import AgentClient, AgentSession
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import ScriptedSampler

TOKEN = "0123456789abcdef"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class ResultGrader:
    """Gives 1 if the agent's result is the answer of the task."""

    group = False

    async def grade(self, rollouts: list[Rollout], tools: object = None) -> None:
        for rollout in rollouts:
            rollout.reward = float(rollout.metadata.get("agent_result") == {"answer": rollout.label})


@dataclass
class World:
    """A runner whose episodes wait for agents, and the address at which they start sessions."""

    renderer: ChatRenderer
    config: AgentConfig
    script: Any = ("one",) * 100
    sources: Sequence[str] = ("",)
    retries: str = "drop"
    graded: bool = False
    limits: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    sampler: ScriptedSampler = field(init=False)

    def run(self, talk: "Callable[[World], Awaitable[object]]", jobs: int = 1) -> list[Rollout]:
        """Run episodes beside a coroutine, and return their rollouts once both have ended."""

        async def both() -> list[Rollout]:
            agents = AgentsElsewhere(self.config, keep_alive_s=0.01)
            async with agents.serving() as self.url:
                runner = self._runner(agents)
                sources = [source for source in self.sources for _ in range(jobs)]
                tasks = [
                    Job(replace(TASK, id=f"{source}/t" if source else TASK.id), 1, f"{source or 'e'}/{number}")
                    for number, source in enumerate(sources)
                ]
                episodes = asyncio.create_task(runner.run_many(tasks))
                await talk(self)
                return await episodes

        return asyncio.run(both())

    def _runner(self, agents: AgentsElsewhere) -> EpisodeRunner:
        encode, end = self.renderer.encode, self.renderer.end_token_id
        self.sampler = ScriptedSampler(self.script, encode=encode, end_token_id=end)
        bounds = {"max_turns": 8, "max_tokens": 4096, "max_seconds": 20.0, "max_new_tokens": 64} | self.limits
        context = EpisodeContext(Env, self.renderer, self.sampler, {}, Limits(**bounds), SamplingParams(seed=5))
        failure = FailureConfig(sampler="retry", agent=self.retries, max_failed_share=1)
        settings = {
            source: EpisodeSettings(
                context, AgentElsewhere(self.config, source, agents), ResultGrader() if self.graded else None
            )
            for source in self.sources
        }
        return EpisodeRunner(settings, FailurePolicy(failure), EpisodeSlots(8))


def chat(session: AgentSession, *messages: str) -> str:
    """Return the policy's answer to messages of the user, each followed by the policy's own."""
    history: list[dict[str, Any]] = []
    reply: dict[str, Any] = {}
    for message in messages:
        history.append({"role": "user", "content": message})
        headers = {"authorization": f"Bearer {session.key}"}
        response = httpx.post(
            f"{session.openai_base_url}/chat/completions", json={"messages": history}, headers=headers
        )
        assert response.status_code == 200, response.text
        reply = response.json()["choices"][0]["message"]
        history.append(reply)
    return str(reply["content"])


@pytest.fixture
def config() -> AgentConfig:
    return AgentConfig(port=free_port(), reward="session", prompt="{prompt} Think.")


def test_agents_play_all_episodes_and_give_rewards(renderer: ChatRenderer, config: AgentConfig) -> None:
    def play(client: AgentClient, number: int) -> None:
        session = client.start()
        assert session is not None
        with session:
            assert session.task["id"] == "t"
            assert "answer" not in session.task
            assert session.task["prompt"] == [{"role": "user", "content": TASK.question}]
            assert session.prompt == f"{TASK.question} Think."
            assert session.env["OPENAI_API_KEY"] == session.key
            assert session.env["AGENTRL_SESSION_URL"] == session.session_url
            assert chat(session, "a", "b") == "one"
            session.reward(5.0, {"first": 1.0})
            session.end(float(number), metrics={"number": float(number)})
            session.end(99.0)  # sent again: no effect

    async def talk(world: World) -> None:
        client = AgentClient(world.url)
        await asyncio.gather(*(asyncio.to_thread(play, client, number) for number in range(4)))
        client.close()

    rollouts = World(renderer, config).run(talk, jobs=4)
    assert sorted(rollout.reward for rollout in rollouts) == [0.0, 1.0, 2.0, 3.0]
    for rollout in rollouts:
        assert rollout.failure is None
        assert rollout.metrics == {"first": 1.0, "number": rollout.reward}
        assert [turn.action for turn in rollout.turns] == ["one", "one"]
        assert rollout.stop_reason is StopReason.TERMINATED


def test_a_reward_function_gets_the_result_and_no_reward_is_taken(renderer: ChatRenderer, config: AgentConfig) -> None:
    def play(world: World) -> None:
        client = AgentClient(world.url)
        session = client.start()
        assert session is not None
        chat(session, "a")
        for refused in (lambda: session.reward(1.0), lambda: session.end(1.0)):
            with pytest.raises(httpx.HTTPStatusError, match=r"403 .*rollout\.agent\.reward=session"):
                refused()
        session.end(answer="It lies in Remu.", result={"answer": "Remu"}, metrics={"steps": 2})

    config = config.model_copy(update={"reward": "function"})
    (rollout,) = World(renderer, config, graded=True).run(lambda world: asyncio.to_thread(play, world))
    assert (rollout.reward, rollout.metrics) == (1.0, {"steps": 2.0})
    assert rollout.metadata[ANSWER] == "It lies in Remu."


def crash(session: AgentSession) -> None:
    with session:
        chat(session, "a")
        raise RuntimeError("the browser is gone")


def test_the_episode_of_a_failed_agent_begins_again(renderer: ChatRenderer, config: AgentConfig) -> None:
    def play(world: World) -> None:
        client = AgentClient(world.url)
        session = client.start()
        assert session is not None
        with pytest.raises(RuntimeError, match="the browser is gone"):
            crash(session)
        again = client.start()
        assert again is not None
        assert again.id == f"{session.id}~1"
        session.end(1.0)  # sent again: no effect
        with again:
            chat(again, "a")
            again.end(1.0)

    world = World(renderer, config, retries="retry")
    (rollout,) = world.run(lambda world: asyncio.to_thread(play, world))
    assert (rollout.reward, rollout.failure) == (1.0, None)


def test_a_lost_agent_is_noticed_and_reads_that_its_session_is_over(
    renderer: ChatRenderer, config: AgentConfig
) -> None:
    def play(world: World) -> None:
        client = AgentClient(world.url)
        sessions = [client.start() for _ in range(3)]  # none of them is played
        assert [session.id for session in sessions if session is not None] == ["e/0", "e/0~1", "e/0~2"]
        assert sessions[0] is not None
        with pytest.raises(httpx.HTTPStatusError, match=r"410 .*this session is over: it sent no request for rollout"):
            sessions[0].end(1.0)

    config = config.model_copy(update={"idle_timeout_s": 0.05})
    (rollout,) = World(renderer, config, retries="retry").run(lambda world: asyncio.to_thread(play, world))
    assert rollout.failure is not None
    assert "sent no request for rollout.agent.idle_timeout_s=0.05" in rollout.failure.message
    assert rollout.dropped


@pytest.mark.parametrize(
    ("end", "limits", "message"),
    [
        ({"failure": "no display"}, {}, "it reported a failure: no display"),
        (None, {"max_seconds": 0.2}, "did not end within rollout.max_seconds=0.2; its last request was"),
        ({"reward": 1.0}, {}, "ended without a turn of the policy"),
    ],
)
def test_what_went_wrong_is_in_the_failure(
    renderer: ChatRenderer, config: AgentConfig, end: Any, limits: Any, message: str
) -> None:
    def play(world: World) -> None:
        session = AgentClient(world.url).start()
        assert session is not None
        if end is not None:
            session.end(**end)

    (rollout,) = World(renderer, config, limits=limits).run(lambda world: asyncio.to_thread(play, world))
    assert rollout.failure is not None
    assert rollout.dropped
    assert (rollout.failure.kind, rollout.failure.error) == (FailureKind.AGENT, "AgentProgramError")
    assert rollout.failure.message.startswith(f"rollout.agent.port={config.port}: it ")
    assert message in rollout.failure.message


def test_limits_end_a_session_and_a_failure_after_them_is_none(renderer: ChatRenderer, config: AgentConfig) -> None:
    def play(world: World) -> None:
        session = AgentClient(world.url).start()
        assert session is not None
        assert "rollout.max_turns" in chat(session, "a", "b")
        session.end(0.5, failure="I was cut off")

    (rollout,) = World(renderer, config, limits={"max_turns": 1}).run(lambda world: asyncio.to_thread(play, world))
    assert (rollout.failure, rollout.reward, rollout.stop_reason) == (None, 0.5, StopReason.MAX_TURNS)


def test_a_lost_engine_is_not_the_agents_failure(renderer: ChatRenderer, config: AgentConfig) -> None:
    def play(world: World) -> None:
        client = AgentClient(world.url)
        session = client.start()
        assert session is not None
        with pytest.raises(AssertionError, match="this episode has failed: gone"):
            chat(session, "a")
        again = client.start()
        assert again is not None
        assert again.id.endswith("~1")
        with pytest.raises(httpx.HTTPStatusError, match=r"410 .*it failed: gone"):
            session.end(1.0)
        chat(again, "a")
        again.end(2.0)

    answers: list[Any] = [SamplerError("gone"), "one"]
    world = World(renderer, config, script=lambda request: answers.pop(0))
    (rollout,) = world.run(lambda world: asyncio.to_thread(play, world))
    assert (rollout.failure, rollout.reward) == (None, 2.0)


async def post(url: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        return await client.post(url + path, json=body, headers=headers)


def test_starts_wait_for_episodes_and_no_episode_is_given_twice(renderer: ChatRenderer, config: AgentConfig) -> None:
    async def talk(world: World) -> None:
        url = world.url
        # A client that is lost while it waits takes none: no episode of this source comes.
        lost = asyncio.create_task(post(url, "/v1/sessions", {"source": "other"}))
        first = (await post(url, "/v1/sessions", {}, **{"idempotency-key": "k"})).json()
        lost.cancel()
        assert (await post(url, "/v1/sessions", {}, **{"idempotency-key": "k"})).json() == first
        none = await post(url, "/v1/sessions", {"wait_s": 0})
        assert (none.status_code, none.headers["retry-after"]) == (429, "1")
        for body, words in (({"wait_s": 61}, "wait_s=61"), ({"wait_s": "a"}, "wait_s"), ([1], "no JSON object")):
            refused = await post(url, "/v1/sessions", body)
            assert refused.status_code == 400
            assert words in refused.text
        key = {"authorization": f"Bearer {first['key']}"}
        assert (await post(url, "/v1/session/end", {}, **key)).status_code == 400  # no reward
        for body in ({"reward": "1"}, {"reward": 1, "metrics": [1]}, {"failure": 3}, {"reward": 10**400}):
            assert (await post(url, "/v1/session/end", body, **key)).status_code == 400, body
        assert (await post(url, "/v1/session/end", {"result": "x" * 2**20}, **key)).status_code == 413
        chat_path = "/v1/chat/completions"
        assert (await post(url, chat_path, {"messages": [{"role": "user", "content": "a"}]}, **key)).status_code == 200
        assert (await post(url, "/v1/session/end", {"reward": 1}, **key)).json() == {"turns": 1}
        # It may be sent again: before the run has taken note, and after.
        assert (await post(url, "/v1/session/end", {"reward": 9}, **key)).json() == {"turns": 1}
        await until(lambda: _is_over(url, key))
        assert (await post(url, "/v1/session/end", {"reward": 9}, **key)).json() == {"turns": 1}

    async def _is_over(url: str, key: dict[str, str]) -> bool:
        return (await post(url, "/v1/session/reward", {"reward": 1}, **key)).status_code == 410

    (rollout,) = World(renderer, config).run(talk)
    assert rollout.reward == 1.0


def test_an_episode_waits_for_an_agent_for_as_long_as_it_takes(renderer: ChatRenderer, config: AgentConfig) -> None:
    async def talk(world: World) -> None:
        waits = [asyncio.create_task(post(world.url, "/v1/sessions", {"wait_s": 0.05})) for _ in range(2)]
        statuses = sorted([(await wait).status_code for wait in waits])
        assert statuses == [200, 429]
        (session,) = [wait.result().json() for wait in waits if wait.result().status_code == 200]
        assert session["source"] == ""
        assert session["model"] == "policy"
        await post(world.url, "/v1/session/end", {"failure": "-"}, authorization=f"Bearer {session['key']}")

    (rollout,) = World(renderer, config, limits={"max_seconds": 20.0}).run(talk)
    assert rollout.failure is not None


def test_a_start_that_is_sent_again_replaces_the_first(renderer: ChatRenderer, config: AgentConfig) -> None:
    async def talk(world: World) -> None:
        body = {"source": "other", "wait_s": 30}
        first = asyncio.create_task(post(world.url, "/v1/sessions", body, **{"idempotency-key": "k"}))
        second = await post(world.url, "/v1/sessions", body | {"wait_s": 0}, **{"idempotency-key": "k"})
        while not first.done():
            second = await post(world.url, "/v1/sessions", body | {"wait_s": 0}, **{"idempotency-key": "k"})
        assert (second.status_code, first.result().status_code) == (429, 409)
        session = (await post(world.url, "/v1/sessions", {})).json()
        await post(world.url, "/v1/session/end", {"failure": "-"}, authorization=f"Bearer {session['key']}")

    World(renderer, config).run(talk)


def test_agents_choose_a_source(renderer: ChatRenderer, config: AgentConfig) -> None:
    def play(world: World) -> None:
        client = AgentClient(world.url)
        for source in ("b", "a"):
            session = client.start(source=source)
            assert session is not None
            assert (session.source, session.task["id"]) == (source, f"{source}/t")
            chat(session, source)
            session.end(1.0)

    rollouts = World(renderer, config, sources=("a", "b")).run(lambda world: asyncio.to_thread(play, world))
    assert [rollout.prompt_id for rollout in rollouts] == ["a/t", "b/t"]


def test_agents_that_wait_are_told_that_the_run_is_over(config: AgentConfig) -> None:
    class Transport(httpx.BaseTransport):
        """Answers as the run has answered."""

        def __init__(self, status: int, content: bytes) -> None:
            self.status, self.content = status, content

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(self.status, content=self.content)

    async def run() -> list[dict[str, Any]]:
        agents = AgentsElsewhere(config)
        sent: list[dict[str, Any]] = []
        is_waiting = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if receive_bodies:
                return {"type": "http.request", "body": receive_bodies.pop()}
            is_waiting.set()  # for an episode, and for the end of the connection
            return await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message)

        receive_bodies = [b"{}"]
        headers = [(b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": "/v1/sessions", "headers": headers, "query_string": b""}
        async with agents.serving():
            request = asyncio.create_task(agents.gateway.app(scope, receive, send))
            await is_waiting.wait()
        await request
        return sent

    start, body = asyncio.run(run())
    assert start["status"] == 410
    assert AgentClient("http://run", transport=Transport(start["status"], body["body"])).start() is None


def test_starts_need_the_token_and_none_comes_from_a_web_page(
    renderer: ChatRenderer, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(world: World) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"x-api-key": TOKEN}):
            response = await post(world.url, "/v1/sessions", {}, **headers)
            assert response.status_code == 401
            assert TOKEN_VARIABLE in response.json()["error"]
        session = await asyncio.to_thread(AgentClient(world.url).start)
        assert session is not None
        assert (await post(world.url, "/v1/models", {}, authorization=f"Bearer {TOKEN}")).status_code == 401
        await asyncio.to_thread(session.end, failure="-")

    async def refuse_pages(world: World) -> None:
        for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            assert (await post(world.url, "/v1/sessions", {}, **headers)).status_code == 403
        session = await asyncio.to_thread(AgentClient(world.url).start)
        assert session is not None
        await asyncio.to_thread(session.end, failure="-")

    World(renderer, config).run(refuse_pages)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    World(renderer, config.model_copy(update={"port": free_port()})).run(refuse)


def test_an_address_of_other_machines_needs_a_token(config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    exposed = config.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"rollout\.agent\.host=0\.0\.0\.0 .* set AGENTRL_AGENT_TOKEN"):
        agent_token(exposed)
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match=r"AGENTRL_AGENT_TOKEN has 5 characters"):
        agent_token(exposed)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert agent_token(exposed) == TOKEN


def test_a_port_in_use_names_the_key(config: AgentConfig) -> None:
    async def run() -> None:
        async with AgentsElsewhere(config).serving(), AgentsElsewhere(config).serving():
            pass

    with pytest.raises(PortInUseError, match=rf"port {config.port} .*rollout\.agent\.port"):
        asyncio.run(run())


def run_config(*settings: str) -> Config:
    return load_config(None, ["env.name=single_turn", "data.path=x.jsonl", *settings])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout.agent.command=x"], "rollout.agent.command=x and rollout.agent.port=8100 all say what plays"),
        (["rollout.generate=a.py:f"], "rollout.agent.port=8100 and rollout.generate=a.py:f both say what plays"),
        (["rollout.agent.sandbox=docker"], "rollout.agent.sandbox=docker is for a program that the run starts"),
        (["rollout.runners=2"], "rollout.runners=2 with rollout.agent.port=8100: episodes of agents elsewhere run"),
        (["rollout.agent={port: null, idle_timeout_s: 5}"], "no rollout.agent.command, rollout.agent.harness or"),
        (["rollout.agent={port: null, command: x, host: '::1'}"], "rollout.agent.host=::1 is for an agent elsewhere"),
        (["sources.a.rollout.agent.port=1", "sources.b={}"], "a run has one address for agents elsewhere"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(run_config("rollout.agent.port=8100", *settings))


def test_agents_elsewhere_may_be_those_of_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    many = ["rollout.concurrency=4096", "rollout.batch_size=1024"]
    check(config := run_config("sources.a.rollout.agent.port=8100", "sources.b={}", *many))
    assert runner_count(config) == 0  # they all start sessions in the run's own process
    assert runner_count(run_config("sources.a={}", "sources.b={}", *many)) > 0


def test_a_resumed_run_may_have_another_port_and_no_other_agent() -> None:
    keys = recorded_keys(run_config("rollout.agent.port=8100"))
    moved = recorded_keys(run_config("rollout.agent={port: 8200, host: 127.0.0.2, idle_timeout_s: 9}"))
    assert changed_keys(keys, moved, SAMPLED) == []
    assert [change.key for change in changed_keys(keys, recorded_keys(run_config()), SAMPLED)] == ["rollout.agent.port"]
