"""Turns of the policy that an agent program sends back in another form: they go on, or begin a new row that says so."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from gateway_episodes import ADD, Play, Played, Program, answer, sampled, user
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentrl.core.types import ForkReason
from agentrl.gateway import agent_session

Form = Callable[[dict[str, Any]], dict[str, Any]]


def calls_in_form(write: Callable[[Any], Any]) -> Form:
    """Return a form whose arguments of calls are written by a function."""

    def form(message: dict[str, Any]) -> dict[str, Any]:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = write(json.loads(call["function"]["arguments"]))
            calls.append(call | {"function": call["function"] | {"arguments": arguments}})
        return message | ({"tool_calls": calls} if calls else {})

    return form


def reverse(value: Any) -> Any:
    """Return a JSON value with the keys of all objects in reverse order."""
    if isinstance(value, dict):
        return {key: reverse(value[key]) for key in reversed(value)}
    return [reverse(member) for member in value] if isinstance(value, list) else value


def collapse(text: str) -> str:
    return re.sub(r"\s+", " ", text)


EQUAL: dict[str, Form] = {
    "as it is": lambda message: message,
    "stripped": lambda message: message | {"content": (message["content"] or "").strip()},
    "arguments parsed": calls_in_form(lambda value: value),
    "keys of arguments reversed": calls_in_form(lambda value: json.dumps(reverse(value))),
    "arguments escaped and indented": calls_in_form(lambda value: json.dumps(value, indent=2, sort_keys=True)),
    "fields without a value": lambda message: {
        key: value or None for key, value in message.items() if key in {"role", "content", "reasoning_content"} or value
    },
}
CHANGED: dict[str, Form] = {
    "white space collapsed": lambda message: message | {"content": collapse(message["content"] or "")},
    "line ends of Windows": lambda message: message | {"content": (message["content"] or "").replace("\n", "\r\n")},
    "white space of arguments collapsed": calls_in_form(
        lambda value: {key: collapse(member) if isinstance(member, str) else member for key, member in value.items()}
    ),
}
DROPPED: dict[str, Form] = {
    "without reasoning": lambda message: {key: value for key, value in message.items() if "reasoning" not in key}
}
FORMS = EQUAL | CHANGED | DROPPED

VALUES = st.recursive(
    st.one_of(st.sampled_from([1, 2.0, True, None, "a", "two  words", "é\n\u2028", ""]), st.integers()),
    lambda members: st.lists(members, max_size=2) | st.dictionaries(st.sampled_from("xyz"), members, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["b", "a", "c"]), VALUES, max_size=3)
WORDS = st.sampled_from(["", "one", " one  two ", "a\nb", "\tx\n\n y"])


@st.composite
def turns(draw: st.DrawFn) -> str:
    """Draw what the policy samples in a turn."""
    thought = draw(st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>\na  b\n</think>\n\n"]))
    calls = [
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(draw(ARGUMENTS), ensure_ascii=False)}}}</tool_call>'
        for _ in range(draw(st.integers(0, 2)))
    ]
    return thought + draw(WORDS) + "".join(calls)


def play_resent(play: Play, script: list[str], forms: list[str]) -> Played:
    """Play an episode whose program sends turn ``i`` back in form ``i`` each time."""

    async def talk(program: Program) -> None:
        messages = [user("begin")]
        for number, name in enumerate(forms):
            reply = await program.chat(*messages, tools=[ADD])
            messages += [
                FORMS[name](reply),
                *(answer(call, "3") for call in reply.get("tool_calls") or ()),
                user(f"go on {number}"),
            ]
        await program.chat(*messages, tools=[ADD])

    return play([*script, "end"], talk)


def check_samples(played: Played) -> None:
    """Check that each sampled turn is trained once, behind exactly the tokens that it was sampled behind."""
    trained = 0
    for row in played.rollout.rows:
        starts = [index for index in range(len(row.mask)) if row.mask[index] and (not index or not row.mask[index - 1])]
        for start in starts:
            end = next((index for index in range(start, len(row.mask)) if not row.mask[index]), len(row.mask))
            ids = row.token_ids.tolist()
            requests = [list(request.prompt.token_ids) for request in played.sampler.requests]
            assert ids[:start] in requests, "a turn is trained behind another prompt than its own"
            trained += end - start
    assert trained == played.rollout.sampled_tokens


@given(
    script=st.lists(turns(), min_size=1, max_size=3),
    forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_turns_are_trained_behind_their_prompts_whatever_is_sent_back(
    play: Play, script: list[str], forms: list[str]
) -> None:
    played = play_resent(play, script, forms[: len(script)])
    check_samples(played)


@given(
    script=st.lists(turns(), min_size=1, max_size=3),
    forms=st.lists(st.sampled_from(sorted(EQUAL)), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_forms_of_the_same_meaning_go_on_in_the_same_row(play: Play, script: list[str], forms: list[str]) -> None:
    played = play_resent(play, script, forms[: len(script)])
    assert len(played.rollout.rows) == 1


@given(script=turns())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_turn_without_its_reasoning_is_a_fork(play: Play, script: str) -> None:
    played = play_resent(play, [script], ["without reasoning"])
    forks = [ForkReason.THINKING] if "<think>" in script else []
    assert [row.fork for row in played.rollout.rows[1:]] == forks


@given(script=turns(), form=st.sampled_from(sorted(CHANGED)))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(script="one\n two", form="white space collapsed")
@example(
    script=' <tool_call>{"name": "add", "arguments": {"a": "b\\nc"}}</tool_call>',
    form="white space of arguments collapsed",
)
def test_a_turn_with_other_white_space_is_a_fork_with_a_warning(
    play: Play, caplog: pytest.LogCaptureFixture, script: str, form: str
) -> None:
    caplog.clear()
    agent_session._logged.clear()
    played = play_resent(play, [script], [form])
    forks = [row.fork for row in played.rollout.rows[1:]]
    assert forks in ([], [ForkReason.CONTEXT])
    assert ("sends a turn of the policy back with other white space" in caplog.text) == bool(forks)


def test_a_last_request_without_tools_is_trained_if_turns_come_back_changed(play: Play) -> None:
    async def talk(program: Program, shown: dict[str, Any]) -> None:
        await program.chat(user("a"), tools=[ADD])
        await program.chat(user("a"), {"role": "assistant", **shown}, user("summarise"))

    turn = "<think>\nhm\n</think>\n\none  two"
    for shown in ({"content": "one two", "reasoning_content": "hm"}, {"content": "one  two"}):
        played = play([turn, "end"], lambda program, shown=shown: talk(program, shown))
        assert played.trained() == [sampled([turn]), sampled(["end"])]
        assert played.rollout.rows[1].fork is ForkReason.CONTEXT
