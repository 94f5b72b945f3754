"""Tasks that an application brings with its sessions: which sessions are samples of one group, and what becomes of the others."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from PIL import Image as pil

from agentrl import Rollout, Task
from agentrl.config.agent import AgentConfig
from agentrl.config.checks import check
from agentrl.config.load import load_config
from agentrl.config.rollout import FailureConfig
from agentrl.config.schema import Config
from agentrl.core.env import Env
from agentrl.core.errors import AgentProgramError, ConfigError
from agentrl.core.images import load_image
from agentrl.core.types import FailureKind, SamplingParams
from agentrl.data.application_tasks import APPLICATION_TASK, ApplicationTasks
from agentrl.data.jobs import TaskJobs
from agentrl.data.task_sources import make_order, open_tasks, read_splits, split_contents
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.episode.state import EpisodeState
from agentrl.gateway import application_groups
from agentrl.gateway.agents_elsewhere import AgentElsewhere, AgentsElsewhere
from agentrl.gateway.application_groups import TaskBody
from agentrl.gateway.client import AgentClient, AgentSession
from agentrl.gateway.dialects.base import convert
from agentrl.models.resolve import resolve_model
from agentrl.obs.waiting import WaitRegistry
from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import ScriptedSampler
from agentrl.train.preflight import check_comparisons


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def application_config(*keys: str) -> Config:
    settings = ["rollout.agent.port=0", "rollout.agent.tasks=application", "rollout.agent.reward=session"]
    return load_config(None, ["env.name=single_turn", *settings, *keys])


@dataclass
class Run:
    """The groups of a step, whose tasks an application brings, and the address at which it does."""

    renderer: ChatRenderer
    samples: int = 1
    groups: int = 1
    slots: int = 8
    failure: str = "drop"
    max_seconds: float = 20.0
    url: str = ""
    config: AgentConfig = field(init=False)
    waits: WaitRegistry = field(default_factory=WaitRegistry)

    def play(self, talk: "Callable[[Run], Awaitable[object]]") -> list[Rollout]:
        """Run the groups beside a coroutine, and return their rollouts once both have ended."""

        async def both() -> list[Rollout]:
            config = application_config(f"rollout.n_samples_per_prompt={self.samples}")
            self.config = config.rollout.agent
            jobs = TaskJobs(config, make_order(config, read_splits(config, open_tasks(config))))
            agents = AgentsElsewhere(self.config, keep_alive_s=0.01)
            token = self.waits.enter()
            async with agents.serving() as self.url:
                episodes = asyncio.create_task(self._runner(agents).run_many(jobs.groups(range(self.groups))))
                self.waits.leave(token)
                await talk(self)
                return await episodes

        return asyncio.run(both())

    def _runner(self, agents: AgentsElsewhere) -> EpisodeRunner:
        encode, end = self.renderer.encode, self.renderer.end_token_id
        sampler = ScriptedSampler(["one"] * 100, encode=encode, end_token_id=end)
        limits = Limits(max_turns=8, max_tokens=4096, max_seconds=self.max_seconds, max_new_tokens=64)
        context = EpisodeContext(Env, self.renderer, sampler, {}, limits, SamplingParams(seed=5))
        loop = AgentElsewhere(self.config, "", agents, self.samples)
        failure = FailureConfig(agent=self.failure, max_failed_share=1)
        return EpisodeRunner({"": EpisodeSettings(context, loop)}, FailurePolicy(failure), EpisodeSlots(self.slots))


async def start(url: str, task: Any, wait_s: float = 20) -> httpx.Response:
    body = {"wait_s": wait_s} | ({} if task is None else {"task": task})
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        return await client.post(f"{url}/v1/sessions", json=body)


async def finish(session: dict[str, Any], **end: Any) -> None:
    """Play a turn of a session, unless it is to fail, and end it."""
    async with httpx.AsyncClient(timeout=30, verify=False, headers={"x-api-key": session["key"]}) as client:
        if "failure" not in end:
            chat = {"messages": [{"role": "user", "content": session["prompt"] or "a"}]}
            assert (await client.post(f"{session['openai_base_url']}/chat/completions", json=chat)).status_code == 200
        reply = await client.post(f"{session['openai_base_url']}/session/end", json=end)
        assert reply.status_code == 200, reply.text


def by_task(rollouts: list[Rollout]) -> dict[Any, list[float]]:
    """Return the rewards of the rollouts of each group, by its id and that of the application's task."""
    rewards: dict[Any, list[float]] = {}
    for rollout in rollouts:
        rewards.setdefault((rollout.prompt_id, rollout.metadata[APPLICATION_TASK]), []).append(rollout.reward)
    return {key: sorted(values) for key, values in rewards.items()}


def test_sessions_of_one_id_are_samples_of_one_group_whatever_comes_between(renderer: ChatRenderer) -> None:
    async def talk(run: Run) -> None:
        first = {"id": "x", "prompt": "Where?", "answer": "Remu", "metadata": {"user": 7}}
        sessions = [
            (await start(run.url, task)).json()
            for task in (first, {"id": "y"}, {"id": "x", "prompt": "Who?"}, {"id": "y"}, {"id": "x"})
        ]
        assert [session["task"]["id"] for session in sessions] == ["x", "y", "x", "y", "x"]
        # The task is that of the group's first session; the third "x" begins another group.
        expected = {"id": "x", "prompt": [{"role": "user", "content": "Where?"}], "metadata": {"user": 7}}
        assert [sessions[0]["task"], sessions[2]["task"]] == [expected, expected]
        assert (sessions[2]["prompt"], sessions[4]["prompt"]) == ("Where?", "")
        assert sessions[4]["task"] == {"id": "x", "prompt": [], "metadata": {}}
        for reward, session in enumerate(sessions):
            await finish(session, reward=reward)
        await finish((await start(run.url, {"id": "x"})).json(), reward=5)

    rollouts = Run(renderer, samples=2, groups=3).play(talk)
    assert by_task(rollouts) == {
        ("application-0", "x"): [0.0, 2.0],
        ("application-1", "y"): [1.0, 3.0],
        ("application-2", "x"): [4.0, 5.0],
    }
    assert [rollout.rollout_id for rollout in rollouts] == [
        f"1/{group}/{sample}" for group in range(3) for sample in (0, 1)
    ]
    assert [(rollout.label, rollout.metadata.get("user")) for rollout in rollouts] == [("Remu", 7)] * 2 + [
        (None, None)
    ] * 4
    assert all(rollout.failure is None and rollout.turns for rollout in rollouts)


def test_a_sample_that_no_session_takes_is_a_named_failure_of_its_group(renderer: ChatRenderer) -> None:
    async def talk(run: Run) -> None:
        assert (await start(run.url, {"id": "x"})).status_code == 200

    taken, *unclaimed = Run(renderer, samples=3, max_seconds=0.2).play(talk)
    assert taken.failure is not None
    assert "it did not end within rollout.max_seconds=0.2" in taken.failure.message
    for rollout in unclaimed:
        assert rollout.dropped
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.failure.error) == (FailureKind.AGENT, "AgentProgramError")
        assert "no session took this sample of the task 'x' within rollout.max_seconds=0.2" in rollout.failure.message
        assert "rollout.n_samples_per_prompt=3" in rollout.failure.message
        assert (rollout.prompt_id, rollout.metadata[APPLICATION_TASK]) == ("application-0", "x")


def test_an_episode_that_is_played_again_keeps_its_task(renderer: ChatRenderer) -> None:
    async def talk(run: Run) -> None:
        sessions = [(await start(run.url, {"id": name})).json() for name in ("x", "y")]
        await finish(sessions[0], failure="the browser is gone")
        assert (await start(run.url, {"id": "z"}, wait_s=0.05)).status_code == 429
        again = (await start(run.url, {"id": "x"})).json()
        assert again["id"] == f"{sessions[0]['id']}~1"
        await finish(again, reward=1)
        await finish(sessions[1], reward=2)

    rollouts = Run(renderer, groups=2, failure="retry").play(talk)
    assert by_task(rollouts) == {("application-0", "x"): [1.0], ("application-1", "y"): [2.0]}


def test_a_group_waits_for_slots_and_its_task_does_not_begin_another(renderer: ChatRenderer) -> None:
    async def talk(run: Run) -> None:
        first = (await start(run.url, {"id": "x"})).json()
        other = asyncio.create_task(start(run.url, {"id": "x"}))
        assert (await start(run.url, {"id": "x"}, wait_s=0.05)).status_code == 429  # the slot is the first one's
        await finish(first, reward=1)
        await finish((await other).json(), reward=2)
        for reward in (3, 4):
            await finish((await start(run.url, {"id": "z"})).json(), reward=reward)

    rollouts = Run(renderer, samples=2, groups=2, slots=1).play(talk)
    assert by_task(rollouts) == {("application-0", "x"): [1.0, 2.0], ("application-1", "z"): [3.0, 4.0]}


def test_starts_that_cannot_be_are_refused_and_say_what_to_send(renderer: ChatRenderer) -> None:
    async def talk(run: Run) -> None:
        none = await start(run.url, None, wait_s=0)
        assert none.status_code == 429
        assert "rollout.agent.tasks=application" in none.text
        assert '{\\"task\\": {\\"id\\"' in none.text
        for task, words in (
            ({}, "id"), ({"id": ""}, "task.id has 0 characters"), ({"id": "x" * 501}, "501"), ({"id": 3}, "str"), ("x", "object"),
            ({"id": "x", "metadata": [1]}, "metadata"), ({"id": "x", "prompt": [{"role": "judge", "content": ""}]}, "judge"),
            ({"id": "x", "answer": 10**400}, "no rollout can record"),
        ):  # fmt: skip
            refused = await start(run.url, task)
            assert refused.status_code == 400, (task, refused.text)
            assert words in refused.text
        assert (await start(run.url, {"id": "x", "answer": "x" * 2**20})).status_code == 413
        await finish((await start(run.url, {"id": "x"})).json(), reward=1)

    Run(renderer).play(talk)


def picture_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_task_of_an_application_has_pictures_that_its_program_sends() -> None:
    """Also each sample of its group; what is no picture of the prompt is refused by name."""
    reader = load_renderer(resolve_model("geometry-warm"))
    red, blue = (load_image(pil.new("RGB", (16, 16), color)) for color in ("red", "blue"))
    prompt = [
        {"role": "user", "content": [picture_part(red.data_url), {"type": "text", "text": "How many?"}]},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "And"}, picture_part(blue.data_url)]},
    ]

    async def talk(run: Run) -> None:
        for content, words in (
            ([picture_part("https://x.org/a.png")], "images are not fetched"),
            ([{"type": "input_audio"}], "input_audio"),
            ([picture_part("data:image/png;base64,aGk=")], "an image must be bytes of PNG"),
        ):
            refused = await start(run.url, {"id": "x", "prompt": [{"role": "user", "content": content}]})
            assert (refused.status_code, words in refused.text) == (400, True), refused.text
        said = [{"role": "assistant", "content": [picture_part(red.data_url)]}]
        assert "assistant has an image" in (await start(run.url, {"id": "x", "prompt": said})).text
        long = load_image(red.data + bytes(2**24))
        many = [{"role": "user", "content": [picture_part(long.data_url)]}]
        assert (await start(run.url, {"id": "x", "prompt": many})).status_code == 413
        sessions = [(await start(run.url, {"id": "x", "prompt": prompt})).json() for _ in range(2)]
        for reward, session in enumerate(sessions):
            assert session["task"]["prompt"] == prompt
            await finish({**session, "prompt": session["task"]["prompt"][0]["content"]}, reward=reward)

    rollouts = Run(reader, samples=2).play(talk)
    assert by_task(rollouts) == {("application-0", "x"): [0.0, 1.0]}
    for rollout in rollouts:
        [row] = rollout.rows
        assert [span.digest for span in row.images] == [red.digest]
        assert rollout.images == {red.digest: red}


def test_groups_with_many_bytes_of_pictures_are_forgotten_once_they_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    red = load_image(pil.new("RGB", (16, 16), "red"))
    monkeypatch.setattr(application_groups, "COMPLETE_IMAGE_BYTES", 2 * len(red.data))
    groups = application_groups.TaskGroups()
    body = convert({"id": "x", "prompt": [{"role": "user", "content": [picture_part(red.data_url)]}]}, TaskBody)
    for number in range(3):
        group = groups.find(EpisodeState(f"1/{number}/0", 0), "", 1)
        groups.begin(group, Task(f"application-{number}", (), metadata={APPLICATION_TASK: ""}), body)
        groups.settle(group, f"1/{number}/0")
    retries = [EpisodeState(f"1/{number}/0", 0, attempt=1) for number in range(3)]
    with pytest.raises(AgentProgramError, match="forgotten"):
        groups.find(retries[0], "", 1)
    assert all(groups.find(retry, "", 1).image_bytes == len(red.data) for retry in retries[1:])


def test_the_client_brings_tasks_and_waits_as_long_as_it_is_told(renderer: ChatRenderer) -> None:
    def play(run: Run) -> None:
        client = AgentClient(run.url)
        session = client.start({"id": "x", "prompt": "Where?"})
        assert isinstance(session, AgentSession)
        assert session.prompt == "Where?"
        with pytest.raises(TimeoutError, match=r"wait_s=0\.1: .*no episode waits"):
            client.start({"id": "y"}, wait_s=0.1)
        with session:
            reply = httpx.post(
                f"{session.session_url}/messages",
                json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
            )
            assert reply.status_code == 200
            session.end(1.0)
        client.close()

    (rollout,) = Run(renderer).play(lambda run: asyncio.to_thread(play, run))
    assert (rollout.reward, rollout.metadata[APPLICATION_TASK]) == (1.0, "x")


def test_a_report_says_what_the_application_must_do(renderer: ChatRenderer) -> None:
    async def talk(run: Run) -> None:
        session = (await start(run.url, {"id": "x"})).json()
        texts = sorted(wait.text for wait in run.waits.innermost_waits() if wait.kind == "agent")
        played = texts.pop(0)
        assert played.startswith(
            f"rollout 1/0/0, turn 0, rollout.agent.port={run.config.port}: agent elsewhere, to send a request or to end: its "
            "last request was 0 s ago, 0 turns so far; it has 2"
        )
        assert played.endswith(" s left (rollout.max_seconds=20)")
        assert [text.partition(": agent ")[2] for text in texts] == [
            f"elsewhere, to take another sample of its task 'x' (POST {run.url}/v1/sessions), at most rollout.max_seconds=20",
            *[f'elsewhere, to bring a task: POST {run.url}/v1/sessions {{"task": {{"id": …}}}}'] * 2,
        ]
        await finish(session, reward=1)
        for task in ("x", "y", "y"):
            await finish((await start(run.url, {"id": task})).json(), reward=1)

    Run(renderer, samples=2, groups=2).play(talk)


def test_placeholders_have_no_end_and_go_on_after_a_resume() -> None:
    config = application_config()
    splits = read_splits(config, open_tasks(config))
    order = make_order(config, splits)
    assert isinstance(order, ApplicationTasks)
    assert [task.id for task in order.get_samples(2)] == ["application-0", "application-1"]
    resumed = make_order(config, splits)
    resumed.load_state(order.state())
    assert [task.id for task in resumed.get_samples(1)] == ["application-2"]
    assert split_contents(config, splits)["content of tasks.train_split"].startswith("no end")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["tasks.name=multihop"], r"tasks\.name=multihop and rollout\.agent\.tasks=application"),
        (["data.path=tasks.jsonl"], r"data\.path=tasks\.jsonl and rollout\.agent\.tasks=application"),
        (["tasks.data_source.name=curriculum"], r"tasks\.data_source\.name=curriculum chooses among the tasks"),
        (["rollout.agent.reward=environment"], r"set rollout\.agent\.reward=session or function"),
        (["rollout.agent={port: null, command: a}"], r"rollout\.agent\.tasks=application is for an agent elsewhere"),
    ],
)  # fmt: skip
def test_keys_that_contradict_tasks_of_the_application_are_refused(keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(application_config(*keys))


def test_one_sample_a_task_needs_an_estimator_that_compares_no_group() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.n_samples_per_prompt=1 .*algo\.advantage\.name=reinforce_plus_plus"
    ):
        check_comparisons(application_config("rollout.n_samples_per_prompt=1"))
    check_comparisons(application_config("rollout.n_samples_per_prompt=1", "algo.advantage.name=reinforce_plus_plus"))
    check_comparisons(application_config("rollout.n_samples_per_prompt=2"))
