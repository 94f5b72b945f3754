"""Requests of an agent program as conversations of one rollout."""

import asyncio
import json
from dataclasses import replace

from gateway_episodes import ADD, CALL, Play, Program, answer, sampled, user
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.core.types import ForkReason, MaskReason, Message, ToolCall
from agentrl.gateway.dialects.base import make_tool
from agentrl.gateway.joining import History

SYSTEM = {"role": "system", "content": "Be brief."}


def test_a_conversation_with_tool_calls_is_one_row_and_is_never_tokenised_again(play: Play) -> None:
    async def talk(program: Program) -> None:
        messages = [SYSTEM, user("add")]
        for _ in range(2):
            reply = await program.chat(*messages, tools=[ADD])
            (call,) = reply["tool_calls"]
            # A client writes arguments anew, and splits texts into parts.
            call["function"]["arguments"] = json.dumps({"b": 2.0, "a": 1}, indent=2)
            messages += [reply, answer(call, "3")]
        messages[1] = {"role": "user", "content": [{"type": "text", "text": "add"}]}
        assert (await program.chat(*messages, tools=[ADD]))["content"] == "It is 3."

    script = [f"Hm. {CALL}", CALL, "It is 3."]
    played = play(script, talk)
    assert played.trained() == [sampled(script)]
    first, second, third = played.prompts()
    assert second == f"{first}{script[0]}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert third.startswith(f"{second}{script[1]}<|im_end|>")
    assert [reply.json()["choices"][0]["finish_reason"] for reply in played.replies] == [
        "tool_calls",
        "tool_calls",
        "stop",
    ]
    first_reply = played.replies[0].json()
    assert first_reply["choices"][0]["message"]["content"] == "Hm. "
    assert first_reply["usage"]["prompt_tokens"] == len(played.sampler.requests[0].prompt.token_ids)
    assert first_reply["usage"]["completion_tokens"] == len(script[0]) + 1


def test_a_turn_that_is_continued_twice_branches_at_exactly_this_turn(play: Play) -> None:
    async def talk(program: Program) -> None:
        first = await program.chat(user("a"))
        second = await program.chat(user("a"), first, user("b"))
        await program.chat(user("a"), first, user("b"), second, user("c"))
        await program.chat(user("a"), first, user("other"))

    played = play(["one", "two", "three", "four"], talk)
    assert played.trained() == [sampled(["one", "two", "three"]), sampled(["four"])]
    assert played.rollout.rows[1].fork is ForkReason.BRANCH
    assert "one<|im_end|>\n<|im_start|>user\nother" in played.prompts()[3]
    assert [turn.action for turn in played.rollout.turns] == ["one", "two", "three", "four"]


def test_parallel_requests_are_branches(play: Play) -> None:
    async def talk(program: Program) -> None:
        first = await program.chat(user("a"))
        await asyncio.gather(*(program.chat(user("a"), first, user(text)) for text in "bcd"))

    played = play(lambda request: "first" if request.turn == 0 else f"turn {request.turn}", talk)
    assert len(played.rollout.rows) == 3
    assert sum(int(row.mask.sum()) for row in played.rollout.rows) == played.rollout.sampled_tokens


def test_a_rewritten_history_and_a_subagent_are_forks(play: Play) -> None:
    async def talk(program: Program) -> None:
        await program.chat(SYSTEM, user("a"), tools=[ADD])
        await program.chat({"role": "system", "content": "You are a subagent."}, user("b"), tools=[ADD])
        await program.chat(SYSTEM, user("a summary"), tools=[ADD])

    played = play(["one", "two", "three"], talk)
    assert played.trained() == [sampled(["one"]), sampled(["two"]), sampled(["three"])]
    assert [row.fork for row in played.rollout.rows] == [None, ForkReason.BRANCH, ForkReason.CONTEXT]


def test_dropped_reasoning_is_an_honest_fork(play: Play) -> None:
    async def talk(program: Program) -> None:
        first = await program.chat(user("a"))
        assert (first["reasoning_content"], first["content"]) == ("hm", "one")
        await program.chat(user("a"), first, user("b"))
        await program.chat(user("a"), {"role": "assistant", "content": "one"}, user("c"))

    played = play(["<think>\nhm\n</think>\n\none", "two", "three"], talk)
    assert len(played.rollout.rows) == 2
    assert played.rollout.rows[1].fork is ForkReason.THINKING
    assert "hm" in played.prompts()[1]
    assert "hm" not in played.prompts()[2]


def test_other_tools_are_rendered_again_with_the_turns_as_they_were_sampled(play: Play) -> None:
    odd = CALL.replace('": ', '"  :  ')

    async def talk(program: Program) -> None:
        first = await program.chat(user("a"), tools=[ADD])
        assert first["tool_calls"]
        other = {**ADD, "function": {**ADD["function"], "description": "Sum."}}
        await program.chat(user("a"), first, answer(first["tool_calls"][0], "3"), tools=[other])

    played = play([odd, "two"], talk)
    assert [row.fork for row in played.rollout.rows] == [None, ForkReason.CONTEXT]
    assert odd in played.prompts()[1]
    assert "Sum." in played.prompts()[1]


def test_auxiliary_requests_are_kept_and_not_trained(play: Play) -> None:
    async def talk(program: Program) -> None:
        await program.chat(user("quota"), max_tokens=1)
        await program.chat({"role": "system", "content": "Write a title."}, user("a"))
        await program.chat({"role": "system", "content": "Write a title."}, user("a b"))
        first = await program.chat(SYSTEM, user("a"), tools=[ADD])
        await program.chat(SYSTEM, user("a"), first, user("summarise"))

    played = play(["x", "title", "title 2", "one", "summary"], talk)
    rows = played.rollout.rows
    assert played.trained() == ["", "", "", sampled(["one"]), sampled(["summary"])]
    for row in rows[:3]:
        assert set(row.mask_reason[row.versions >= 0].tolist()) == {MaskReason.AUXILIARY}


def test_equal_turns_with_other_tokens_are_ambiguous_and_only_what_follows_is_masked(play: Play) -> None:
    async def talk(program: Program) -> None:
        first = await program.chat(user("a"), tools=[ADD])
        again = await program.chat(user("a"), tools=[ADD])
        for reply in (first, again):
            reply["tool_calls"][0]["id"] = "mine"
        await program.chat(user("a"), first, answer(first["tool_calls"][0], "3"), tools=[ADD])

    script = [CALL.replace(", ", ",   "), CALL.replace(", ", ",  ")]
    played = play([*script, "which"], talk)
    assert played.trained() == [sampled(script[:1]), sampled(script[1:]), ""]
    assert MaskReason.AMBIGUOUS in played.rollout.rows[2].mask_reason.tolist()


def test_ids_of_calls_tell_equal_turns_apart(play: Play) -> None:
    async def talk(program: Program) -> None:
        await program.chat(user("a"), tools=[ADD])
        again = await program.chat(user("a"), tools=[ADD])
        await program.chat(user("a"), again, answer(again["tool_calls"][0], "3"), tools=[ADD])

    other = CALL.replace(", ", ",  ")
    played = play([CALL, other, "that"], talk)
    assert played.trained() == [sampled([CALL]), sampled([other, "that"])]


def test_a_stop_string_is_sampled_and_not_shown(play: Play) -> None:
    async def talk(program: Program) -> None:
        first = await program.chat(user("a"), stop=["</end>"])
        assert first["content"] == "one "
        await program.chat(user("a"), first, user("b"))

    played = play(["one </end>", "two"], talk)
    assert played.trained() == ["one </end>two<|im_end|>"]


TEXTS = st.sampled_from(["", "a", " a ", "<think>\nhm\n</think>\n\na"])
IDS = st.sampled_from(["x", "y"])
ARGUMENTS = st.sampled_from([{"a": 1}, {"a": True}, {"a": 1.0}])
CALLS = st.lists(st.builds(ToolCall, IDS, st.just("add"), ARGUMENTS), max_size=2, unique_by=lambda call: call.id)
REPLIES = st.builds(Message, st.just("assistant"), TEXTS, CALLS.map(tuple))
RESULTS = st.builds(Message, st.just("tool"), TEXTS, tool_call_id=IDS)
MESSAGES = st.lists(st.one_of(st.builds(Message, st.just("user"), TEXTS), REPLIES, RESULTS), min_size=1, max_size=5)

TWO_CALLS = (ToolCall("x", "add", {"a": 1}), ToolCall("y", "add", {"a": 1}))
RESULT = Message("tool", "a", tool_call_id="x")


@example(
    [Message("assistant", "", TWO_CALLS), RESULT], RESULT, 0, [Message("assistant", "", TWO_CALLS[::-1]), RESULT], True
)
@given(earlier=MESSAGES, reply=REPLIES, begin=st.integers(0, 6), end=MESSAGES, same_tools=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_history_has_the_same_digests_with_and_without_an_earlier_one(
    earlier: list[Message], reply: Message, begin: int, end: list[Message], same_tools: bool
) -> None:
    """Arguments that Python takes for equal are not, and results belong to calls by the order of these."""
    tools, others = [make_tool("add", "", {"default": 1})], [make_tool("add", "", {"default": True})]
    known = History(earlier, tools)
    known.add_reply(reply)
    messages = [*(replace(message) for message in [*earlier, reply][:begin]), *end]
    offered = tools if same_tools else others
    history, alone = History(messages, offered, known), History(messages, offered)
    assert (history.meanings, history.whole, history.unthought) == (alone.meanings, alone.whole, alone.unthought)
    ids = [[call.id for call in message.tool_calls] for message in messages]
    assert [[call.id for call in message.tool_calls] for message in history.messages] == ids
