"""Subagents and context compression: several conversations in one rollout, over one graph of tokens."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Message, Rewrite, Rollout, StopReason, Task, ToolCall, ToolCalls, ToolResults, tool
from agentrl.audit.run import rollout_faults
from agentrl.batch.provenance import check_rows
from agentrl.batch.sequences import SampledSequence
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import EnvironmentFailure
from agentrl.core.types import FinishReason, ForkReason, Generation, MaskReason, Provenance, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.environment_episode import Episode
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.episode.state import EpisodeState
from agentrl.episode.trajectory import Trajectory
from agentrl.sft.demonstrate import demonstrate
from agentrl.testing import ContractError, ScriptedSampler, check_env

TASK = Task("t", (Message("user", "plan it"),), answer="x")
BRANCH, CONTEXT = ForkReason.BRANCH, ForkReason.CONTEXT
END = "<|im_end|>"


class Keeping(ScriptedSampler):
    """Keeps what it said; answers a request by the last number in its name, later the smaller it is."""

    said: tuple[tuple[tuple[int, ...], Generation], ...] = ()

    async def generate(self, prompt, params, **names):
        for _ in range(9 - int(names["request_id"][-1])):
            await asyncio.sleep(0)
        generation = await super().generate(prompt, params, **names)
        self.said += ((prompt.token_ids, generation),)
        return generation


def build(renderer, script, generate=None, env=Env, **limits):
    sampler = Keeping(script, encode=renderer.encode, end_token_id=renderer.end_token_id, version=3)
    given = {"max_turns": 20, "max_tokens": 4096, "max_seconds": 30.0, "max_new_tokens": 64} | limits
    return EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=env,
                    renderer=renderer,
                    sampler=sampler,
                    tool_clients={},
                    limits=Limits(**given),
                    sampling=SamplingParams(max_new_tokens=given["max_new_tokens"], seed=5, temperature=0.7),
                ),
                generate=generate,
            )
        },
        FailurePolicy(FailureConfig(max_failed_share=1)),
        EpisodeSlots(4),
    ), sampler


def play(renderer, script, generate=None, **options):
    runner, sampler = build(renderer, script, generate, **options)
    (rollout,) = asyncio.run(runner.run_many([Job(TASK, 1, "e")]))
    check(rollout, sampler.said)
    return rollout, sampler


def check(rollout, samples):
    """Every sampled token is trained once, and the rows hold what the sampler was asked with what it said."""
    assert rollout.failure is None, rollout.failure
    assert rollout_faults(rollout) == []
    rows = rollout.rows
    check_rows(rows)
    sampled = [token for _, generation in samples for token in generation.token_ids]
    assert sum(int(row.mask.sum()) for row in rows) == len(sampled) == rollout.sampled_tokens
    trained = {}
    for row in rows:
        for position in np.flatnonzero(row.mask):
            request = row.request_ids[row.requests[position]]
            trained.setdefault(request, []).append((int(row.token_ids[position]), float(row.logprobs[position])))
    for prompt, generation in samples:
        path = prompt + generation.token_ids
        assert any(tuple(row.token_ids[: len(path)].tolist()) == path for row in rows)
        if generation.token_ids:
            expected = zip(generation.token_ids, np.float32(generation.logprobs).tolist(), strict=True)
            assert trained[generation.request_id] == list(expected)
    assert len({generation.request_id for _, generation in samples}) == len(samples)
    assert [row.key.row for row in rows] == list(range(len(rows)))
    assert [row.fork is None for row in rows] == [row.key.row == 0 for row in rows]
    assert {row.key.rollout_id for row in rows} <= {"e"}
    assert {row.temperature for row in rows} <= {0.7}


def texts(renderer, rollout):
    return [renderer.decode(row.token_ids[row.mask == 1].tolist()) for row in rollout.rows]


def test_subagents_beside_each_other_are_rows_of_one_rollout(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        helpers = [chat.branch([Message("user", f"part {letter}")]) for letter in "ab"]
        answers = await asyncio.gather(*(helper.sample() for helper in helpers))
        chat.add(Message("user", " ".join(answer.content for answer in answers)))
        await chat.sample()
        return chat.rollout(1.0)

    rollout, sampler = play(renderer, lambda request: request.request_id, generate)
    assert texts(renderer, rollout) == [
        "e/0<|im_end|>e/1<|im_end|>",
        "e/branch-0/0<|im_end|>",
        "e/branch-1/0<|im_end|>",
    ]
    assert [row.fork for row in rollout.rows] == [None, BRANCH, BRANCH]
    assert [turn.action for turn in rollout.turns] == ["e/0", "e/1", "e/branch-0/0", "e/branch-1/0"]
    assert rollout.turns[1].reward == rollout.reward == 1.0
    assert {request.session_id for request in sampler.requests} == {"e"}
    assert sampler.closed == ["e"]
    assert len({request.params.seed for request in sampler.requests}) == 4


def test_branches_share_what_was_said_before_and_it_is_trained_once(renderer):
    """Both go on from the same turn, at the same time; the chat itself does not."""

    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        tries = [chat.branch() for _ in range(2)]
        for number, branch in enumerate(tries):
            branch.add(Message("user", f"try {number}"))
        await asyncio.gather(*(branch.sample() for branch in tries))
        return chat.rollout()

    rollout, sampler = play(renderer, lambda request: request.request_id, generate)
    first, second = rollout.rows
    assert texts(renderer, rollout) == ["e/0<|im_end|>e/branch-0/0<|im_end|>", "e/branch-1/0<|im_end|>"]
    shared = second.mask_reason == MaskReason.SHARED
    assert renderer.decode(second.token_ids[shared].tolist()) == "e/0<|im_end|>"
    assert (first.token_ids[: len(shared)][shared] == second.token_ids[shared]).all()
    assert (first.fork, second.fork) == (None, BRANCH)
    assert [turn.action for turn in rollout.turns] == ["e/0", "e/branch-0/0", "e/branch-1/0"]
    assert sampler.requests[1].prompt.token_ids[: len(first.token_ids)] != ()


def test_a_branch_continues_from_the_end_of_an_earlier_turn_while_the_chat_goes_on(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        ends = []
        for _ in range(3):
            await chat.sample()
            ends.append(chat.last_turn)
            chat.add(Message("user", "more"))
        going_on = asyncio.create_task(chat.sample())
        await asyncio.sleep(0)
        branch = chat.branch(end=ends[1], fork=CONTEXT)
        assert [message.content for message in branch.messages] == ["plan it", "e/0", "more", "e/1"]
        branch.add(Message("user", "otherwise"))
        await branch.sample()
        await going_on
        return chat.rollout()

    rollout, sampler = play(renderer, lambda request: request.request_id, generate)
    assert texts(renderer, rollout) == [
        "".join(f"e/{turn}<|im_end|>" for turn in range(4)),
        "e/branch-0/0<|im_end|>",
    ]
    (branched,) = [request for request in sampler.requests if "branch" in request.request_id]
    assert renderer.decode(branched.prompt.token_ids).endswith(
        "e/1<|im_end|>\n<|im_start|>user\notherwise<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rollout.rows[1].fork is CONTEXT
    shared = rollout.rows[1].mask_reason == MaskReason.SHARED
    assert renderer.decode(rollout.rows[1].token_ids[shared].tolist()) == "e/0<|im_end|>e/1<|im_end|>"
    assert [turn.action for turn in rollout.turns] == ["e/0", "e/1", "e/2", "e/3", "e/branch-0/0"]


def test_what_a_masked_chat_samples_is_kept_and_not_trained(renderer):
    """Layout of the second row: prompt, ``title`` sampled and masked; of the first: prompt, two turns sampled and trained."""

    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        title = chat.branch([Message("user", "a title")])
        title.mask(MaskReason.AUXILIARY)
        await title.sample()
        chat.add(Message("user", "more"))
        await chat.sample()
        return chat.rollout()

    runner, _ = build(renderer, lambda request: request.request_id, generate)
    (rollout,) = asyncio.run(runner.run_many([Job(TASK, 1, "e")]))
    assert rollout_faults(rollout) == []
    check_rows(rollout.rows)
    assert texts(renderer, rollout) == ["e/0<|im_end|>e/1<|im_end|>", ""]
    sampled_T = rollout.rows[1].provenance == Provenance.SAMPLED
    assert renderer.decode(rollout.rows[1].token_ids[sampled_T].tolist()) == "e/branch-0/0<|im_end|>"
    assert set(rollout.rows[1].mask_reason[sampled_T].tolist()) == {MaskReason.AUXILIARY}


def test_a_new_branch_of_a_full_chat_has_room(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        chat.add(Message("user", "x" * 200))
        assert await chat.sample() is None
        assert chat.stop_reason is StopReason.MAX_TOKENS
        assert await chat.branch([Message("user", "b")]).sample() is not None
        return chat.rollout()

    rollout, _ = play(renderer, lambda request: request.request_id, generate, max_tokens=200)
    assert texts(renderer, rollout) == ["e/0<|im_end|>", "e/branch-0/0<|im_end|>"]


def test_the_same_tokens_sampled_twice_are_two_samples(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await asyncio.gather(chat.branch().sample(), chat.sample(), chat.branch().sample())
        return chat.rollout()

    rollout, _ = play(renderer, lambda request: "same", generate)
    assert texts(renderer, rollout) == ["same<|im_end|>"] * 3
    assert [row.request_ids for row in rollout.rows] == [("e/0",), ("e/branch-0/0",), ("e/branch-1/0",)]
    assert [row.fork for row in rollout.rows] == [None, BRANCH, BRANCH]


def test_rows_do_not_depend_on_who_was_first(renderer):
    """The requests are answered in another order; the rows stay as they are."""

    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        helpers = [chat.branch() for _ in range(3)]

        async def work(helper, waits):
            for _ in range(waits):
                await asyncio.sleep(0)
            for _ in range(2):
                helper.add(Message("user", "the same for all"))
                await helper.sample()

        order = [30, 20, 10] if task.metadata["late"] else [0, 10, 20]
        chat.add(Message("user", "and you"))
        await asyncio.gather(
            chat.sample(), *(work(helper, waits) for helper, waits in zip(helpers, order, strict=True))
        )
        return chat.rollout()

    made = []
    for late in (False, True):
        runner, _ = build(renderer, lambda request: request.request_id, generate)
        task = Task("t", TASK.prompt, metadata={"late": late})
        (rollout,) = asyncio.run(runner.run_many([Job(task, 1, "e")]))
        made.append([(row.fork, row.token_ids.tolist(), row.mask.tolist(), row.request_ids) for row in rollout.rows])
    assert made[0] == made[1]
    assert len(made[0]) == 4


def test_a_summary_replaces_the_conversation_when_the_context_is_full(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        summaries = 0
        while True:
            reply = await chat.sample()
            if reply is None and chat.stop_reason is StopReason.MAX_TOKENS and summaries < 2:
                summaries += 1
                chat.rewrite([*task.prompt, Message("user", f"so far: {len(chat.messages)}")])
                assert chat.stop_reason is None
                continue
            if reply is None:
                break
            chat.add(Message("user", "go on"))
        return chat.rollout()

    rollout, sampler = play(renderer, ["abcdefgh"] * 12, generate, max_tokens=190, max_turns=12)
    assert [row.fork for row in rollout.rows] == [None, CONTEXT, CONTEXT]
    assert all(len(row.token_ids) <= 190 for row in rollout.rows)
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert len(rollout.turns) == 12
    prompts = [renderer.decode(request.prompt.token_ids) for request in sampler.requests]
    assert sum("so far" in prompt for prompt in prompts) > 1


def test_rewriting_keeps_what_was_said_and_drops_what_was_not_yet_read(renderer):
    async def generate(task, agent):
        chat = agent.chat([Message("user", "never read")])
        chat.rewrite(task.prompt)
        assert chat.messages == task.prompt
        await chat.sample()
        chat.add(Message("user", "never read"))
        chat.rewrite([Message("user", "new")])
        chat.add(Message("user", "more"))
        assert [message.content for message in chat.messages] == ["new", "more"]
        side = chat.branch()
        await chat.sample()
        await side.sample()
        return chat.rollout()

    rollout, sampler = play(renderer, ["one", "two", "three"], generate)
    assert texts(renderer, rollout) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert [row.fork for row in rollout.rows] == [None, CONTEXT, CONTEXT]
    assert [(turn.action, turn.observation) for turn in rollout.turns] == [("one", "new"), ("two", ""), ("three", "")]
    assert not any("never" in renderer.decode(request.prompt.token_ids) for request in sampler.requests)
    assert sampler.requests[1].prompt == sampler.requests[2].prompt


def test_turns_of_branches_count_and_their_context_is_their_own(renderer):
    async def generate(task, agent):
        chat = agent.chat([Message("user", "x" * 100)])
        await chat.sample()
        side = chat.branch(task.prompt)
        deep = side.branch([Message("user", "y" * 500)])
        assert await deep.sample() is None
        assert deep.stop_reason is StopReason.MAX_TOKENS
        assert await side.sample() is not None
        chat.add(Message("user", "again"))
        assert await chat.sample() is None
        assert chat.stop_reason is StopReason.MAX_TURNS
        return chat.rollout()

    rollout, _ = play(renderer, ["a", "b"], generate, max_turns=2, max_tokens=200)
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert len(rollout.rows) == 2


def test_calls_of_branches_have_ids_of_their_own(renderer):
    @tool()
    async def double(number: int) -> str:
        """Double it."""
        return str(2 * number)

    ids = []

    async def generate(task, agent):
        chat = agent.chat(task.prompt, tools=[double])
        side = chat.branch([Message("user", "you too")])
        bare = chat.branch([Message("user", "you not")], tools=[])
        for one in (chat, side, bare):
            reply = await one.sample()
            ids.extend(call.id for call in reply.tool_calls)
        assert (await agent.call("double", {"number": 2})).content == "4"
        return chat.rollout()

    play(
        renderer,
        ['<tool_call>{"name": "double", "arguments": {"number": 1}}</tool_call>'] * 3,
        generate,
        max_new_tokens=99,
    )
    assert ids == ["0.0", "0.0.0"]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda chat: chat.branch().rollout(), "a branch is part of its chat's rollout"),
        (lambda chat: chat.rewrite([]), "needs the messages to continue from"),
        (lambda chat: chat.rewrite(["hm"]), "takes agentrl.Message, not 'hm'"),
        (lambda chat: chat.branch([Message("user", "a")]).rewrite([]), "needs the messages"),
    ],
)
def test_mistakes(renderer, mistake, words):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        mistake(chat)
        return chat.rollout()

    runner, _ = build(renderer, [], generate)
    (rollout,) = asyncio.run(runner.run_many([Job(TASK, 1, "e")]))
    assert rollout.failure is not None
    assert words in rollout.failure.message


def test_a_chat_that_is_sampling_is_not_branched_or_rewritten(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        running = asyncio.ensure_future(chat.sample())
        await asyncio.sleep(0)
        for use in (chat.branch, lambda: chat.rewrite(task.prompt)):
            with pytest.raises(RuntimeError, match="this chat is sampling"):
                use()
        side = chat.branch([Message("user", "aside")])
        await asyncio.gather(running, side.sample())
        return chat.rollout()

    rollout, _ = play(renderer, lambda request: request.request_id, generate)
    assert len(rollout.rows) == 2


class Summing(Env):
    """Asks for words; after each second one it puts all of them in a summary."""

    def reset(self, *, seed=None, options=None):
        first = super().reset(seed=seed, options=options)
        self.words = []
        return first

    def step(self, action):
        if isinstance(action, ToolResults):
            return Rewrite((Message("user", f"words: {' '.join(self.words)}"),)), 0.25, False, False, {}
        self.words.append(action.content)
        over = len(self.words) > 4
        if len(self.words) % 2 or over:
            return (Message("user", "more"),), 0.0, over, False, {}
        if len(self.words) == 4:
            return (
                ToolCalls((ToolCall(f"c{len(self.words)}", "count", {"words": len(self.words)}),)),
                0.0,
                False,
                False,
                {},
            )
        return Rewrite((Message("user", f"words: {' '.join(self.words)}"),)), 0.5, False, False, {}

    def get_state(self):
        return {**super().get_state(), "words": self.words}

    def set_state(self, state):
        super().set_state(state)
        self.words = state["words"]


@tool()
async def count(words: int) -> str:
    """Count."""
    return str(words)


Summing.tools = (count,)


def test_an_environment_rewrites_the_conversation(renderer):
    rollout, sampler = play(renderer, ["one", "two", "three", "four", "five"], env=Summing)
    assert [row.fork for row in rollout.rows] == [None, CONTEXT, CONTEXT]
    assert [turn.observation for turn in rollout.turns] == [
        "more",
        "words: one two",
        "more",
        "words: one two three four",
        "more",
    ]
    assert rollout.reward == 0.75
    assert [turn.reward for turn in rollout.turns] == [0, 0.5, 0, 0.25, 0]
    assert renderer.render((Message("user", "words: one two"),), (count,)) == sampler.requests[2].prompt
    check_env(Summing)


def test_an_episode_that_was_rewritten_goes_on_from_its_state(renderer):
    script = ["one", "two", "three", "four", "five"]
    full_rollout, _ = play(renderer, script, env=Summing)

    async def run(turns):
        runner, _ = build(renderer, script[:turns], env=Summing)
        first = Episode(runner._by_source[""].context, TASK, EpisodeState("e", 1))
        with pytest.raises(AssertionError, match="wants more"):
            await first.run()
        state, env_state = EpisodeState.from_dict(json.loads(json.dumps(await first.snapshot())))
        resumed_runner, _ = build(renderer, lambda request: script[turns + request.turn], env=Summing)
        await Episode(resumed_runner._by_source[""].context, TASK, state, env_state).run()
        return state

    for turns in range(1, 5):
        state = asyncio.run(run(turns))
        rows = state.trajectory.rows("t", "e")
        assert state.counters.turns == 5
        assert [row.token_ids.tolist() for row in rows] == [row.token_ids.tolist() for row in full_rollout.rows]
        assert [(row.fork, row.request_ids) for row in rows] == [
            (row.fork, row.request_ids) for row in full_rollout.rows
        ]


class BeginsAnew(Env):
    def reset(self, *, seed=None, options=None):
        return Rewrite((Message("user", "hm"),)), super().reset(seed=seed, options=options)[1]

    def step(self, action):
        return (), 0.0, True, False, {}


class Empties(Env):
    def step(self, action):
        return Rewrite(()), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("env", "words"), [(BeginsAnew, "begins an episode with a Rewrite"), (Empties, "one or more Messages, not")]
)
def test_environments_that_rewrite_wrongly(renderer, env, words):
    runner, _ = build(renderer, ["a"], env=env)
    (rollout,) = asyncio.run(runner.run_many([Job(TASK, 1, "e")]))
    assert rollout.failure is not None
    assert words in rollout.failure.message


def test_the_check_of_environments_and_demonstrations_know_rewrites(renderer):
    with pytest.raises(ContractError, match=r"BeginsAnew\.reset gives a Rewrite; only step may"):
        check_env(BeginsAnew)
    with pytest.raises(EnvironmentFailure, match="rewrites the conversation; one row cannot show"):
        asyncio.run(demonstrate(Summing, TASK, Expert(), seed=0, tool_clients={}, renderer=renderer, max_turns=4))


class Expert:
    def act(self, messages):
        return "word"


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["say", "say", "say", "branch", "subagent", "rewrite", "return"]),
        st.integers(0, 9),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


@given(actions=ACTIONS, forgets=st.booleans(), beside=st.booleans())
def test_whatever_is_branched_and_rewritten_each_token_is_trained_once(renderer, forgetful, actions, forgets, beside):
    """Random conversations in one rollout, one after the other or beside each other; few words, so that much is shared.

    Each token belongs to the turn of its request, also where a conversation returns to what it was before a rewrite.
    """

    async def generate(task, agent):
        chats = [agent.chat(task.prompt)]
        waiting, earlier = {}, {0: chats[0].messages}

        async def settle():
            await asyncio.gather(*waiting.values())
            waiting.clear()

        for kind, which, word in actions:
            number = which % len(chats)
            chat, message = chats[number], Message("user", f"w{word}")
            if number in waiting or not beside:
                await settle()
            if kind == "say":
                chat.add(message)
                waiting[number] = asyncio.ensure_future(chat.sample())
            elif kind == "rewrite":
                earlier[number] = chat.messages
                chat.rewrite([message])
            elif kind == "return":
                chat.rewrite([*earlier.get(number, task.prompt), message])
            else:
                chats.append(chat.branch([message] if kind == "subagent" else None))
        await settle()
        return chats[0].rollout(0.5)

    def script(request):
        return ["a", "ab", "b", ""][sum(map(ord, request.request_id)) % 4]

    rollout, sampler = play(forgetful if forgets else renderer, script, generate, max_turns=9)
    assert len(rollout.turns) == len(sampler.requests) <= 9
    check_turns(rollout, sampler)


def check_turns(rollout, sampler):
    """Turns are numbered by conversation: first those of one, then those of its branches, each in the order sampled."""
    requests = sorted(
        (generation.request_id for _, generation in sampler.said),
        key=lambda name: (
            [int(segment_name.rpartition("-")[2]) for segment_name in name.split("/")[1:-1]] + [-1, int(name[-1])]
        ),
    )
    sequence = SampledSequence(tuple(rollout.rows))
    places = {row.key: np.array([requests.index(name) for name in row.request_ids]) for row in rollout.rows}
    values = {row.key: places[row.key][row.requests] for row in rollout.rows if row.request_ids}
    assert sequence.gather(values).tolist() == sequence.turns_S.tolist()


def test_rows_and_turns_after_a_return_to_an_earlier_context_are_in_the_order_sampled(renderer):
    """
    row 0   plan it | a | more | c |    turns 0 and 2
    row 1   summary | b |               turn 1
    """

    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        context = [*chat.messages, Message("user", "more")]
        chat.rewrite([Message("user", "summary")])
        await chat.sample()
        chat.rewrite(context)
        await chat.sample()
        return chat.rollout(1.0)

    rollout, sampler = play(renderer, ["a", "b", "c"], generate)
    check_turns(rollout, sampler)
    assert texts(renderer, rollout) == [f"a{END}c{END}", f"b{END}"]
    assert [(row.turns, row.fork) for row in rollout.rows] == [((0, 2), None), ((1,), CONTEXT)]
    values = {row.key: row.token_ids for row in rollout.rows}
    assert (
        renderer.decode(SampledSequence(tuple(rollout.rows)).gather(values).astype(int).tolist())
        == f"a{END}b{END}c{END}"
    )


OPS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(["go", "go", "anew", "branch"]), st.lists(st.integers(0, 2), max_size=4)
    ),
    max_size=14,
)


def grow(trajectories, ops, samples, first=0):
    for number, (which, kind, tokens) in enumerate(ops, first):
        trajectory = trajectories[which % len(trajectories)]
        if kind == "branch":
            trajectories.append(trajectory.branch())
            continue
        prompt = (*trajectory.token_ids, *tokens) if kind == "go" else tuple(tokens)
        trajectory.extend_to(prompt, added=len(tokens) if kind == "go" else None, fork=CONTEXT)
        ids = tuple(tokens[::-1])
        trajectory.append_sampled(
            Generation(ids, (-0.5,) * len(ids), FinishReason.STOP, ((0, number),), 0, f"r{number}")
        )
        samples.append((prompt, ids))


def flat(trajectory):
    return [
        (row.key, row.fork, row.request_ids, row.token_ids.tolist(), row.mask_reason.tolist(), row.versions.tolist())
        for row in trajectory.rows("t", "e")
    ]


@given(OPS, OPS)
def test_the_graph_of_several_conversations(before, after):
    trajectories, samples = [Trajectory()], []
    grow(trajectories, before, samples)
    state = trajectories[0].to_state()
    back = Trajectory.from_state(json.loads(json.dumps(state)))
    assert back.to_state() == state
    assert flat(back) == flat(trajectories[0])
    states, actual = [back], {(): back}
    for trajectory in trajectories[1:]:
        *parent, index = trajectory.branch_name
        actual[trajectory.branch_name] = actual[tuple(parent)].branches[index]
        states.append(actual[trajectory.branch_name])
        assert states[-1].token_ids == trajectory.token_ids
    grow(states, after, [], 99)
    grow(trajectories, after, samples, 99)
    assert flat(back) == flat(trajectories[0])
    rows = trajectories[0].rows("t", "e")
    assert sum(int(row.mask.sum()) for row in rows) == sum(len(ids) for _, ids in samples) == back.sampled_tokens
    assert all((row.provenance[row.mask == 1] == Provenance.SAMPLED).all() for row in rows)
    sampled = trajectories[0].sampled_tokens if rows else 0
    assert rollout_faults(Rollout("t", "e", rows, 0.0, StopReason.TERMINATED, sampled_tokens=sampled)) == []
    made = [tuple(row.token_ids.tolist()) for row in rows]
    assert not rows or all(any(row[: len(p + ids)] == p + ids for row in made) for p, ids in samples)
    assert all(any(p + ids == row for p, ids in samples) for row in made)
    assert [row.fork is None for row in rows] == [row.key.row == 0 for row in rows]
