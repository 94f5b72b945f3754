"""The Search-R1 protocol: what is parsed, what is observed, and what scores."""

import warnings

import pytest
from agentrl_envs.search_r1 import SearchR1Env
from agentrl_envs.search_r1.protocol import INVALID_ACTION, Parsed, document, parse
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Message, Task, ToolCalls, ToolResult, ToolResults, ToolStatus
from agentrl.core.env import Step
from agentrl.core.errors import ConfigError, TaskError

TASK = Task("t", (Message("user", "Where was Tamo born?"),), answer=["Sadova"], metadata={"corpus": "train"})
TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>", "<think>", "</think>"]
TEXTS = st.lists(st.sampled_from([*TAGS, "Sadova", " ", "\n", "<", "/", ">"]) | st.text(max_size=5)).map("".join)


def hit(contents: str, score: float = 1.0) -> dict[str, object]:
    return {"document": {"id": "d", "contents": contents}, "score": score}


def say(env: SearchR1Env, text: str) -> Step:
    return env.step(Message("assistant", text))


def find(env: SearchR1Env, call: ToolCalls, *contents: str) -> Step:
    result = ToolResult(call.calls[0].id, ToolStatus.OK, "", data=[hit(text) for text in contents])
    return env.step(ToolResults((result,)))


def started(task: Task = TASK, seed: int = 0, **options: object) -> SearchR1Env:
    env = SearchR1Env(**options)  # type: ignore[arg-type]
    env.reset(seed=seed, options={"task": task})
    return env


def test_the_prompt_is_the_published_one() -> None:
    (message,), info = SearchR1Env().reset(seed=0, options={"task": TASK})
    assert message.role == "user"
    assert not message.inline
    assert message.content == (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
        "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
        "<search> query </search> and it will return the top searched results between <information> and "
        "</information>. You can search as many times as your want. If you find no further external knowledge needed, "
        "you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. "
        "For example, <answer> Beijing </answer>. Question: Where was Tamo born?\n"
    )
    assert info["metrics"]["valid_format"] == 0.0


def test_search_then_answer() -> None:
    env = started()
    calls, reward, terminated, truncated, info = say(env, "<think> hm </think> <search> Tamo </search>")
    assert isinstance(calls, ToolCalls)
    assert calls.calls[0].name == "search"
    assert calls.calls[0].arguments == {"query": "Tamo", "topk": 3, "corpus": "train"}
    assert (reward, terminated, truncated) == (0.0, False, False)
    (message,), *_ = find(env, calls, '"Tamo"\nTamo was born in Sadova.', '"Remu"\nA land.\nFar away.')
    assert message == Message(
        "user",
        '\n\n<information>Doc 1(Title: "Tamo") Tamo was born in Sadova.\nDoc 2(Title: "Remu") A land.\nFar away.'
        "</information>\n\n",
        inline=True,
    )
    observation, reward, terminated, truncated, info = say(env, "<answer> the SADOVA. </answer>")
    assert (observation, reward, terminated, truncated) == ((), 1.0, True, False)
    assert info["metrics"] == {
        "exact_match": 1.0,
        "searches": 1.0,
        "valid_format": 1.0,
        "invalid_actions": 0.0,
        "answer_length": 2.0,
    }


def test_an_invalid_turn_is_told_and_remembered() -> None:
    env = started()
    (message,), *_, info = say(env, "I do not know.")
    assert message == Message("user", INVALID_ACTION, inline=True)
    assert message.content.startswith("\nMy previous action is invalid. If I want to search, I should put")
    assert message.content.endswith("Let me try again.\n")
    assert info["metrics"]["invalid_actions"] == 1.0
    *_, info = say(env, "<answer>Sadova</answer>")
    assert (info["metrics"]["exact_match"], info["metrics"]["valid_format"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<search> a </search>", Parsed("search", "a")),
        ("<answer>b</answer>\n", Parsed("answer", "b")),
        # A stop string may end inside a token: the rest of that token is no action.
        ("<search>a</search><answer>b</answer>", Parsed("search", "a")),
        ("<search>a <search>b</search>", Parsed("search", "b")),
        ("<answer> x <search> y </search>", Parsed("search", "y")),
        ("<search> y </answer>", Parsed("invalid")),
        ("</search>", Parsed("invalid")),
        ("<search>  </search>", Parsed("invalid")),
        ("<answer></answer>", Parsed("invalid")),
        ("<search> never closed", Parsed("invalid")),
        ("", Parsed("invalid")),
    ],
)
def test_parse(content: str, expected: Parsed) -> None:
    assert parse(content) == expected


@given(TEXTS)
def test_any_text_can_be_said(content: str) -> None:
    parsed = parse(content)
    assert (parsed.kind == "invalid") == (parsed.text == "")
    env = started()
    observation, reward, terminated, _, info = say(env, content)
    assert env.observation_space.contains(observation)
    assert terminated == (parsed.kind == "answer")
    assert isinstance(observation, ToolCalls) == (parsed.kind == "search")
    assert reward == info["metrics"]["exact_match"]


@given(st.lists(TEXTS, max_size=3))
def test_a_page_never_scores(pages: list[str]) -> None:
    """Whatever stands in the documents, the episode goes on, and what is content next is judged by itself."""
    env = started()
    calls, *_ = say(env, "<search> x </search>")
    assert isinstance(calls, ToolCalls)
    answer = "<answer>Sadova</answer>"
    _, reward, terminated, truncated, info = find(env, calls, *(f"t\n{page} {answer}" for page in pages))
    assert (reward, terminated, truncated, info["metrics"]["exact_match"]) == (0.0, False, False, 0.0)
    _, reward, terminated, *_ = say(env, "Sadova</answer>")
    assert (reward, terminated) == (0.0, False)


def test_searches_are_limited_and_one_last_turn_follows() -> None:
    env = started(max_searches=1)
    calls, *_ = say(env, "<search> x </search>")
    assert isinstance(calls, ToolCalls)
    find(env, calls)
    observation, reward, terminated, truncated, info = say(env, "<search> y </search>")
    assert (observation, reward, terminated, truncated) == ((), 0.0, False, True)
    assert (info["metrics"]["searches"], info["metrics"]["valid_format"]) == (1.0, 0.0)


@pytest.mark.parametrize("status", [ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.INVALID, ToolStatus.UNAVAILABLE])
def test_a_failed_search_is_told(status: ToolStatus) -> None:
    env = started()
    calls, *_ = say(env, "<search> x </search>")
    assert isinstance(calls, ToolCalls)
    (message,), *_ = env.step(ToolResults((ToolResult(calls.calls[0].id, status, "the index is gone"),)))
    assert message.content == (
        f"\n\n<information>The search failed ({status.value}): the index is gone</information>\n\n"
    )


def test_no_hits_and_results_without_data_are_text() -> None:
    env = started()
    calls, *_ = say(env, "<search> x </search>")
    assert isinstance(calls, ToolCalls)
    (message,), *_ = find(env, calls)
    assert message.content == "\n\n<information>No document matches the query.</information>\n\n"
    calls, *_ = say(env, "<search> x </search>")
    assert isinstance(calls, ToolCalls)
    (message,), *_ = env.step(ToolResults((ToolResult(calls.calls[0].id, ToolStatus.OK, "plain"),)))
    assert message.content == "\n\n<information>plain</information>\n\n"


def test_long_documents_are_cut_and_the_tag_stays() -> None:
    env = started(observation_max_chars=20)
    calls, *_ = say(env, "<search> x </search>")
    assert isinstance(calls, ToolCalls)
    (message,), *_ = find(env, calls, "title\n" + "x" * 100)
    assert message.content == "\n\n<information>Doc 1(Title: title) </information>\n\n".replace(") <", ")<")


def test_shuffled_documents_depend_on_the_seed_alone() -> None:
    pages = [f"t{i}\nx" for i in range(6)]

    def shown(seed: int) -> str:
        env = started(seed=seed, shuffle_documents=True)
        calls, *_ = say(env, "<search> x </search>")
        assert isinstance(calls, ToolCalls)
        (message,), *_ = find(env, calls, *pages)
        return str(message.content)

    assert shown(1) == shown(1)
    assert len({shown(seed) for seed in range(10)}) > 1
    assert all(f"Title: t{i}" in shown(3) for i in range(6))


def test_format_reward_is_for_flawless_format_only() -> None:
    env = started(format_reward=0.1)
    assert say(env, "<answer>Remu</answer>")[1] == 0.1
    env = started(format_reward=0.1)
    say(env, "nothing")
    assert say(env, "<answer>Remu</answer>")[1] == 0.0
    assert say(started(format_reward=0.1), "<answer>Sadova</answer>")[1] == 1.0


def test_steps_out_of_turn_are_refused() -> None:
    env = started()
    with pytest.raises(ValueError, match="results for search-1; expected no results"):
        env.step(ToolResults((ToolResult("search-1", ToolStatus.OK, ""),)))
    say(env, "<search> x </search>")
    with pytest.raises(ValueError, match="'search-1' are due"):
        say(env, "<answer> x </answer>")
    with pytest.raises(ValueError, match="results for other; expected search-1"):
        env.step(ToolResults((ToolResult("other", ToolStatus.OK, ""),)))


@pytest.mark.parametrize("options", [{"topk": 0}, {"max_searches": -1}, {"observation_max_chars": 0}, {"prompt": "x"}])
def test_options_that_make_no_sense_name_the_key(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"env\.options\.{next(iter(options))}"):
        SearchR1Env(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [None, [], [1], ""])
def test_a_task_without_answer_is_refused(answer: object) -> None:
    with pytest.raises(TaskError, match="task 't' needs"):
        started(Task("t", (Message("user", "What?"),), answer=answer))


def test_document_without_a_text() -> None:
    assert document(1, "only a title") == "Doc 1(Title: only a title) \n"


def test_gymnasium_finds_no_fault_and_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check_env(SearchR1Env(), skip_render_check=True)
