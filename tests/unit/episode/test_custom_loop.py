"""Episodes played by a function of the user's own."""

import asyncio
import dataclasses
import functools

import numpy as np
import pytest
from agentrl_envs.search_r1 import SearchR1Env
from agentrl_envs.search_r1.protocol import INVALID_ACTION, PROMPT, STOP, documents, information, parse
from agentrl_tools.search import SearchService
from deadlines import until
from hypothesis import given
from hypothesis import strategies as st

import agentrl
from agentrl import Agent, Message, Rollout, StopReason, Task, ToolResult, ToolStatus, tool, uses_tools
from agentrl.batch.provenance import check_rows
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, RunStopped, SamplerError, ToolFailure
from agentrl.core.types import FailureKind, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.custom_loop import load_generate, required_tools
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.rewards import exact_match
from agentrl.testing import ScriptedSampler

CORPUS = [{"id": str(n), "contents": f'"Place {n}"\nPlace {n} lies in Remu, beside place {n + 1}.'} for n in range(9)]
TASK = Task("t", (Message("user", "Where does place 3 lie?"),), answer=["Remu"], metadata={"corpus": "all"})


class LocalSearch:
    """The real search in this process; queries that hold ``fail`` or ``late`` do so."""

    def __init__(self, error=None):
        self.calls, self.closed, self.error = [], [], error
        self._search = SearchService().local_client({"all": CORPUS}, {})

    async def call(self, call, *, episode_id):
        self.calls.append((episode_id, call))
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        for word, status in (("fail", ToolStatus.ERROR), ("late", ToolStatus.TIMEOUT)):
            if word in call.arguments["query"]:
                return ToolResult(call.id, status, word)
        return await self._search.call(call, episode_id=episode_id)

    async def close_session(self, episode_id):
        self.closed.append(episode_id)

    async def aclose(self):
        """Nothing to close."""


def search_r1_loop(*, topk=3, max_searches=4, observation_max_chars=2000, format_reward=0.0, shuffle_documents=False):
    """The protocol of ``envs/agentrl_envs/search_r1`` as a user would write it as a loop."""

    def text(result, rng):
        if result.status is not ToolStatus.OK:
            return f"The search failed ({result.status.value}): {result.content}"
        hits = result.data if not shuffle_documents else [result.data[i] for i in rng.permutation(len(result.data))]
        return documents(hits) if hits else "No document matches the query."

    async def generate(task: Task, agent: Agent) -> Rollout:
        chat = agent.chat([Message("user", PROMPT.replace("{question}", task.question))])
        turns = searches = invalid = 0
        reward = match = 0.0
        answer = stop_reason = None
        while (reply := await chat.sample(stop=STOP)) is not None:
            turns += 1
            action = parse(reply.content)
            if action.kind == "answer":
                answer = action.text
                match = exact_match(answer, task.answer)
                reward = match or (0.0 if invalid else format_reward)
                break
            invalid += action.kind == "invalid"
            if turns > max_searches:
                stop_reason = StopReason.TRUNCATED
                break
            if action.kind == "invalid":
                chat.add(Message("user", INVALID_ACTION, inline=True))
                continue
            searches += 1
            query = {"query": action.text, "topk": topk, "corpus": task.metadata["corpus"]}
            result = await agent.call("search", query)
            chat.add(Message("user", information(text(result, agent.rng)[:observation_max_chars]), inline=True))
        metrics = {
            "exact_match": match,
            "searches": searches,
            "valid_format": not invalid and answer is not None,
            "invalid_actions": invalid,
            "answer_length": len((answer or "").split()),
        }
        return chat.rollout(reward, metrics=metrics, stop_reason=stop_reason)

    return generate


def build(
    renderer, script, generate, *, env=Env, client=None, failure=None, grader=None, cls=ScriptedSampler, **limits
):
    sampler = cls(script, encode=renderer.encode, end_token_id=renderer.end_token_id, version=7)
    client = client or LocalSearch()
    given = {"max_turns": 8, "max_tokens": 4096, "max_seconds": 30.0, "max_new_tokens": 128} | limits
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=env,
                    renderer=renderer,
                    sampler=sampler,
                    tool_clients={"search": client},
                    limits=Limits(**given),
                    sampling=SamplingParams(max_new_tokens=given["max_new_tokens"], seed=5),
                ),
                generate=generate,
                grader=grader,
            )
        },
        FailurePolicy(failure or FailureConfig(max_failed_share=1)),
        EpisodeSlots(8),
    )
    return runner, sampler, client


def play(renderer, script, generate, task=TASK, seed=1, **options):
    runner, sampler, client = build(renderer, script, generate, **options)
    return asyncio.run(runner.run_many([Job(task, seed, "e")])), sampler, client


def plain(rollout):
    """All of a rollout but its wall time, comparable."""
    rows = [
        {
            field.name: value.tolist() if isinstance(value := getattr(row, field.name), np.ndarray) else value
            for field in dataclasses.fields(row)
        }
        for row in rollout.rows
    ]
    return dataclasses.asdict(dataclasses.replace(rollout, rows=[], seconds=0.0, tool_seconds=0.0, tool_uses={})) | {
        "rows": rows
    }


SAID = st.sampled_from(
    [
        "<search> place 3 </search>",
        "<think> hm </think><search>Remu place 7</search>",
        "<search> no such word </search>",
        "<search> fail </search>",
        "<search> late </search>",
        "<search> </search>",
        "<answer> Remu </answer>",
        "<answer> the remu. </answer>",
        "<answer> Sadova, I think </answer>",
        "<answer></answer>",
        "nothing of use",
        "",
        "</search>",
        "<|im_end|>",
    ]
) | st.text(max_size=12)
OPTIONS = st.fixed_dictionaries(
    {
        "topk": st.integers(1, 4),
        "max_searches": st.integers(0, 4),
        "observation_max_chars": st.sampled_from([20, 90, 2000]),
        "format_reward": st.sampled_from([0.0, 0.25]),
        "shuffle_documents": st.booleans(),
    }
)
LIMITS = st.fixed_dictionaries(
    {
        "max_turns": st.integers(1, 6),
        "max_tokens": st.sampled_from([700, 800, 1000, 4096]),
        "max_new_tokens": st.sampled_from([5, 30, 128]),
    }
)


@given(script=st.lists(SAID, min_size=6, max_size=6), options=OPTIONS, limits=LIMITS, seed=st.integers(0, 2**31 - 1))
def test_a_search_loop_gives_the_environments_samples_token_for_token(renderer, script, options, limits, seed):
    """Ids, masks, provenance, log-probabilities, versions, request ids, rewards, metrics, turns, calls: all of it."""
    env = functools.partial(SearchR1Env, **options)
    expected, requests, searched = play(renderer, script, None, seed=seed, env=env, **limits)
    rollouts, sampler, client = play(renderer, script, search_r1_loop(**options), seed=seed, **limits)
    assert [plain(rollout) for rollout in rollouts] == [plain(rollout) for rollout in expected]
    assert sampler.requests == requests.requests
    assert sampler.closed == requests.closed
    assert client.calls == searched.calls
    assert client.closed == searched.closed
    check_rows(rollouts[0].rows)


def test_the_loop_and_the_environment_retry_alike(renderer):
    script = ["<search> place 3 </search>"]
    outcomes = []
    for generate, env in ((None, SearchR1Env), (search_r1_loop(), Env)):
        client = LocalSearch(ToolFailure("gone"))
        (rollout,), sampler, _ = play(renderer, script, generate, env=env, client=client)
        assert rollout.failure is not None
        assert rollout.failure.kind is FailureKind.TOOL
        assert rollout.dropped
        assert rollout.stop_reason is StopReason.FAILED
        assert [request.request_id for request in sampler.requests] == ["e/0", "e~1/0", "e~2/0"]
        assert client.closed == sampler.closed == ["e", "e~1", "e~2"]
        outcomes.append(plain(rollout)["rows"])
    assert outcomes[0] == outcomes[1]


def test_a_template_that_changes_the_past_forks(forgetful):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        while (result := await chat.sample()) is not None and result.content != "done":
            chat.add(Message("user", "more"))
        return chat.rollout(1.0)

    (rollout,), _, _ = play(forgetful, ["a", "b", "done"], generate)
    check_rows(rollout.rows)
    result = [forgetful.decode(row.token_ids[row.mask == 1].tolist()) for row in rollout.rows]
    assert result == ["a<|im_end|>", "b<|im_end|>", "done<|im_end|>"]


async def two_chats(task, agent):
    first, second = agent.chat([Message("user", "one")]), agent.chat([Message("user", "two")])
    await asyncio.gather(first.sample(), second.sample())
    return [first.rollout(0.25), second.rollout(0.75, metrics={"second": 1})]


def test_several_chats_are_several_rollouts_of_one_group(renderer):
    runner, sampler, _ = build(renderer, lambda request: request.session_id, two_chats)
    done = []
    rollouts = asyncio.run(runner.run_many([Job(TASK, n, f"e{n}") for n in range(2)], done.append))
    assert [rollout.rollout_id for rollout in rollouts] == ["e0", "e0.1", "e1", "e1.1"]
    assert {rollout.prompt_id for rollout in rollouts} == {"t"}
    assert [rollout.rows[0].key.rollout_id for rollout in rollouts] == ["e0", "e0.1", "e1", "e1.1"]
    assert [rollout.reward for rollout in rollouts] == [0.25, 0.75] * 2
    assert [rollout.turns[0].action for rollout in rollouts] == ["e0", "e0.1", "e1", "e1.1"]
    assert rollouts[1].rows[0].request_ids == ("e0.1/0",)
    assert rollouts[1].metrics == {"second": 1.0}
    assert rollouts[0].label == ["Remu"]
    assert sorted(map(id, done)) == sorted(map(id, rollouts))
    assert sorted(sampler.closed) == ["e0", "e0.1", "e1", "e1.1"]
    assert len({request.params.seed for request in sampler.requests}) == 4


def test_a_chats_own_tools(renderer):
    @tool()
    async def double(number: int) -> str:
        """Double it."""
        return str(2 * number)

    async def generate(task, agent):
        chat = agent.chat(task.prompt, tools=[double])
        while (reply := await chat.sample()) is not None and reply.tool_calls:
            for call in reply.tool_calls:
                result = await agent.call(call.name, call.arguments)
                chat.add(Message("tool", result.content, tool_call_id=call.id))
        return chat.rollout()

    call = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
    script = [call + call, call.replace("double", "treble"), "done"]
    (rollout,), sampler, _ = play(renderer, script, generate, max_new_tokens=256)
    assert [turn.observation for turn in rollout.turns] == [
        "88",
        "there is no tool 'treble'; there are: double, search",
        "",
    ]
    assert "<|im_start|>tool\n8<|im_end|>" in renderer.decode(sampler.requests[1].prompt.token_ids)
    assert rollout.stop_reason is StopReason.TERMINATED


def test_a_call_of_an_episode_with_several_chats_counts_once(renderer):
    async def generate(task, agent):
        await agent.call("search", {"query": "mayor"})
        return await two_chats(task, agent)

    rollouts, _, _ = play(renderer, lambda request: "done", generate)
    assert [{name: use.calls for name, use in rollout.tool_uses.items()} for rollout in rollouts] == [{"search": 1}, {}]


def test_what_a_chat_tells(renderer):
    seen = {}

    async def generate(task, agent):
        chat = agent.chat([Message("system", "be brief"), *task.prompt])
        assert agent.task is task
        seen["draws"] = agent.rng.integers(1000, size=3).tolist(), agent.seed
        assert chat.stop_reason is None
        await chat.sample()
        chat.add(Message("user", "go on"))
        seen["said"] = [(message.role, message.content) for message in chat.messages]
        assert await chat.sample() is None
        assert await chat.sample() is None
        seen["stop"] = chat.stop_reason
        return chat.rollout(0.5)

    (rollout,), _, _ = play(renderer, ["hm"], generate, seed=11, max_turns=1)
    env = Env()
    env.reset(seed=11)
    assert seen["draws"] == (env.np_random.integers(1000, size=3).tolist(), 11)
    assert [role for role, _ in seen["said"]] == ["system", "user", "assistant", "user"]
    assert seen["said"][2:] == [("assistant", "hm"), ("user", "go on")]
    assert seen["stop"] is rollout.stop_reason is StopReason.MAX_TURNS
    assert [(turn.action, turn.observation, turn.reward) for turn in rollout.turns] == [("hm", "go on", 0.5)]


async def talk(task, agent):
    chat = agent.chat(task.prompt)
    while await chat.sample() is not None:
        chat.add(Message("user", "more"))
    return chat.rollout(0.5)


def test_the_limit_of_tokens(renderer):
    size = len(renderer.render(TASK.prompt).token_ids)
    (rollout,), sampler, _ = play(renderer, ["abcdefgh"], talk, max_tokens=size + 3)
    assert sampler.requests[0].params.max_new_tokens == 3
    assert rollout.stop_reason is StopReason.MAX_TOKENS
    assert len(rollout.rows[0].token_ids) == size + 3
    assert rollout.reward == 0.5


def test_a_prompt_that_leaves_no_room_is_the_tasks_fault(renderer):
    (rollout,), _, _ = play(renderer, [], talk, max_tokens=10)
    assert rollout.failure is not None
    assert rollout.failure.kind is FailureKind.TASK
    assert rollout.dropped


class Slow(ScriptedSampler):
    """Never ends its second turn."""

    aborted = ()
    in_second_turn = False

    async def generate(self, prompt, params, **names):
        if len(self.requests) == 1:
            self.in_second_turn = True
            await asyncio.sleep(60)
        return await super().generate(prompt, params, **names)

    async def abort(self, request_id):
        self.aborted += (request_id,)


class Late(ScriptedSampler):
    """Takes longer for its second turn than an episode may."""

    async def generate(self, prompt, params, **names):
        if len(self.requests) == 1:
            await asyncio.sleep(0.5)
        return await super().generate(prompt, params, **names)


def test_when_time_is_up_the_function_still_rewards_what_there_is(renderer):
    async def slow(task, agent):
        chat = agent.chat(task.prompt)
        reply = await chat.sample()
        await until(lambda: agent.clock.seconds_left <= 0)
        chat.add(Message("user", "go on"))
        assert await chat.sample() is None
        return chat.rollout(reward=0.5 * (reply.content == "a"))

    (rollout,), sampler, _ = play(renderer, ["a"], slow, max_seconds=0.3)
    assert rollout.stop_reason is StopReason.MAX_TIME
    assert rollout.reward == 0.5
    assert sampler.closed == ["e"]
    assert renderer.decode(rollout.rows[0].token_ids[rollout.rows[0].mask == 1].tolist()) == "a<|im_end|>"


def test_an_engines_outage_does_not_count_against_the_function(renderer):
    async def twice(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        chat.add(Message("user", "go on"))
        await chat.sample()
        return chat.rollout(reward=1.0)

    (rollout,), _, _ = play(renderer, ["a", "b"], twice, cls=Late, max_seconds=0.1)
    assert rollout.stop_reason is StopReason.TERMINATED
    assert rollout.seconds > 0.5


def test_chats_that_sample_at_once_stop_the_clock_once(renderer):
    async def both(task, agent):
        chats = [agent.chat(task.prompt) for _ in range(3)]
        seconds_left_before = agent.clock.seconds_left
        await asyncio.gather(*(chat.sample() for chat in chats))
        assert 0 <= seconds_left_before - agent.clock.seconds_left < 0.1
        return [chat.rollout() for chat in chats]

    rollouts, _, _ = play(renderer, ["a", "b", "c"], both, cls=Late, max_seconds=0.4)
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.TERMINATED] * 3


def test_a_function_that_does_not_return_is_cut(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        await asyncio.sleep(60)

    (rollout,), sampler, _ = play(renderer, ["a"], generate, max_seconds=0.2)
    assert rollout.stop_reason is StopReason.MAX_TIME
    assert (rollout.reward, rollout.dropped, rollout.sampled_tokens) == (0.0, False, 2)
    assert [turn.action for turn in rollout.turns] == ["a"]
    assert sampler.closed == ["e"]


def test_an_aborted_chat_is_dropped(renderer):
    async def run():
        runner, sampler, _ = build(renderer, ["abcd"], talk)
        sampler.gate = asyncio.Event()
        running = asyncio.ensure_future(runner.run(TASK, 1, "e"))
        await until(lambda: sampler.running)
        await sampler.abort("e/0")
        return await running

    (rollout,) = asyncio.run(run())
    assert rollout.stop_reason is StopReason.ABORTED
    assert rollout.dropped
    assert rollout.sampled_tokens == 2


def test_cancelling_aborts_and_closes(renderer):
    async def run():
        runner, sampler, _ = build(renderer, ["a"], talk, cls=Slow)
        running = asyncio.ensure_future(runner.run_many([Job(TASK, 1, "e")]))
        await until(lambda: sampler.in_second_turn)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return sampler

    sampler = asyncio.run(run())
    assert sampler.aborted == ("e/1",)
    assert sampler.closed == ["e"]


def raising(error):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        raise error

    return generate


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ZeroDivisionError("by zero"), FailureKind.ENVIRONMENT, "raised ZeroDivisionError: by zero"),
        (TimeoutError("a judge"), FailureKind.ENVIRONMENT, "raised TimeoutError: a judge"),
        (SamplerError("engine is away"), FailureKind.SAMPLER, "engine is away"),
        (ToolFailure("server is away"), FailureKind.TOOL, "server is away"),
    ],
)
def test_failures_keep_their_kind_and_their_tokens(renderer, error, kind, words):
    failure = FailureConfig(environment="train", sampler="train", tool="train")
    (rollout,), sampler, _ = play(renderer, ["a"], raising(error), failure=failure)
    assert rollout.failure is not None
    assert rollout.failure.kind is kind
    assert words in rollout.failure.message
    assert rollout.stop_reason is StopReason.FAILED
    assert rollout.sampled_tokens == 2
    assert [turn.action for turn in rollout.turns] == ["a"]
    assert sampler.closed == ["e"]


def test_a_failure_can_stop_the_run(renderer):
    with pytest.raises(RunStopped, match=r"environment=stop.*raising.*by zero"):
        play(renderer, ["a"], raising(ZeroDivisionError("by zero")), failure=FailureConfig(environment="stop"))


def test_the_users_mistakes_end_the_run(renderer):
    with pytest.raises(ConfigError, match="no key"):
        play(renderer, ["a"], raising(ConfigError("no key")))


async def forgets_to_return(task, agent):
    await agent.chat(task.prompt).sample()


async def returns_a_number(task, agent):
    return 0.5


async def returns_nothing(task, agent):
    return []


async def returns_one_twice(task, agent):
    chat = agent.chat(task.prompt)
    return [chat.rollout(), chat.rollout()]


async def returns_a_stranger(task, agent):
    return Rollout(task.id, "mine", [], 0.0, StopReason.TERMINATED)


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        (forgets_to_return, r"returned None for task 't'; it must return chat\.rollout"),
        (returns_a_number, r"returned 0\.5 for task"),
        (returns_nothing, r"returned \[\] for task"),
        (returns_one_twice, r"rollouts e, e; each must come from a chat of this agent, one from each"),
        (returns_a_stranger, r"rollouts mine; each must come from a chat"),
    ],
)
def test_what_a_function_may_not_return(renderer, generate, words):
    with pytest.raises(ConfigError, match=words):
        play(renderer, ["a"], generate)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda chat: chat.sample(), r"has ended its turn: chat\.add"),
        (lambda chat: chat.add("text"), r"takes agentrl\.Message, not 'text'"),
        (lambda chat: chat.rollout(float("nan")), "reward is nan"),
        (lambda chat: chat.rollout(metrics={"length": float("inf")}), "length is inf"),
        (lambda chat: asyncio.gather(*(chat.sample() for chat in [chat, chat])), "is sampling already"),
    ],
)
def test_misuse_of_a_chat_is_told(renderer, use, words):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        if "sampling" in words:
            chat.add(Message("user", "more"))
        used = use(chat)
        if used is not None:
            await used

    failure = FailureConfig(environment="stop")
    with pytest.raises(RunStopped, match=words):
        play(renderer, ["a", "b"], generate, failure=failure)


def test_a_chat_without_a_message_is_told(renderer):
    async def generate(task, agent):
        await agent.chat([]).sample()

    with pytest.raises(RunStopped, match="needs a message before it can be sampled"):
        play(renderer, ["a"], generate, failure=FailureConfig(environment="stop"))


def test_a_turn_that_a_stop_string_or_the_length_ended_goes_on(renderer):
    """prompt | a! | bcd | ef<|im_end|>: three requests, nothing observed between them."""

    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        for _ in range(3):
            await chat.sample(stop=("!",))
        return chat.rollout()

    (rollout,), _, _ = play(renderer, ["a!", "bcdxx", "ef"], generate, max_new_tokens=3)
    (row,) = rollout.rows
    assert renderer.decode(row.token_ids[row.mask == 1].tolist()) == "a!bcdef<|im_end|>"
    assert row.mask.tolist() == sorted(row.mask.tolist())
    assert row.request_ids == ("e/0", "e/1", "e/2")


def test_a_cut_turn_that_goes_on_is_one_turn_after_a_fork(stubborn):
    """The length cuts "äé" inside of both letters. The template changes earlier turns, so every prompt is rendered anew."""

    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        for _ in range(3):
            await chat.sample()
        chat.add(Message("user", "more"))
        await chat.sample()
        return chat.rollout()

    text = "aäé"
    answers = [stubborn.encode(text)[at : at + 2] + stubborn.encode("xyz") for at in (0, 2)]
    answers += [(*stubborn.encode(text)[4:], stubborn.end_token_id), "done"]
    (rollout,), sampler, _ = play(stubborn, answers, generate, max_new_tokens=2)
    check_rows(rollout.rows)
    assert stubborn.decode(sampler.requests[3].prompt.token_ids) == (
        "2<|im_start|>user\nWhere does place 3 lie?<|im_end|>\n<|im_start|>assistant\naäé<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


FILES = {
    "plain.py": ("def generate(task, agent): ...", "must be a coroutine"),
    "yields.py": ("async def generate(task, agent):\n    yield 1", "must be a coroutine without yield"),
    "narrow.py": ("async def generate(task): ...", r"must take two arguments, .*too many positional"),
    "value.py": ("generate = 3", "is no function but 3"),
}


@pytest.mark.parametrize("name", FILES)
def test_functions_that_cannot_be_used(tmp_path, name):
    source, words = FILES[name]
    (tmp_path / name).write_text(source)
    with pytest.raises(ConfigError, match=words):
        load_generate(f"{tmp_path / name}:generate")


def test_the_tools_of_a_run(tmp_path):
    source = "import agentrl\n\n@agentrl.uses_tools('search')\nasync def named(task, agent): ...\n\n"
    (tmp_path / "mine.py").write_text(source + "async def silent(task, agent): ...\n")
    assert required_tools(None, SearchR1Env, {}) == ("search",)
    assert required_tools(None, Env, {}) == ()
    assert required_tools(f"{tmp_path}/mine.py:silent", SearchR1Env, {}) == ("search",)
    assert required_tools(f"{tmp_path}/mine.py:named", Env, {}) == ("search",)
    assert uses_tools()(returns_nothing).tool_names == ()
    assert {"Agent", "Chat", "Rollout", "uses_tools"} <= set(agentrl.__all__)
