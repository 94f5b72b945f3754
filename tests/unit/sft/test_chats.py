"""Chats of a file: rows and masks token for token, bad rows, order, resume."""

import asyncio
import json
import pickle
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from pyarrow import parquet

from agentrl.config.load import load_config
from agentrl.config.model import RenderConfig
from agentrl.config.schema import Config
from agentrl.config.sft import SftConfig
from agentrl.config.tasks import DataConfig
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, RunStopped
from agentrl.core.tool import Tool
from agentrl.core.types import (
    FinishReason,
    Generation,
    Message,
    Prompt,
    Provenance,
    Row,
    SamplingParams,
    ToolCall,
)
from agentrl.data.chats import Chat, ChatConversion
from agentrl.data.rows import Row as DataRow
from agentrl.data.rows import open_table
from agentrl.episode.context import EpisodeContext
from agentrl.episode.conversation import Conversation
from agentrl.episode.limits import Limits
from agentrl.episode.state import EpisodeState
from agentrl.models.load import load_model
from agentrl.render.formats.base import tool_schema
from agentrl.render.registry import FORMATS, make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.chats import Chats, chat_rows
from agentrl.sft.preflight import plan_sft, prepare_sft
from agentrl.sft.run import sft
from tests.unit.render.conversations import look_up, well_formed
from tests.unit.render.oracles import as_dicts
from tests.unit.render.test_every_template import NAMES, tokenizer
from tests.unit.render.tokenizers import family_tokenizer

ASK, MORE = Message("user", "qa1"), Message("user", "qa2")
CALL, SECOND_CALL = (ToolCall(f"call0000{number}", "look_up", {"word": f"ar{number}"}) for number in range(2))
RESULT = Message("tool", "fo1", tool_call_id="call00000")
CHATS: dict[str, tuple[tuple[Message, ...], tuple[Tool, ...]]] = {
    "answers": ((ASK, Message("assistant", "as1"), MORE, Message("assistant", "as2")), ()),
    "reasoning": (
        (
            ASK,
            Message("assistant", "<think>\nre1\n</think>\n\nas1"),
            MORE,
            Message("assistant", "<think>\nre2\n</think>\n\nas2"),
        ),
        (),
    ),
    "call": ((ASK, Message("assistant", "", (CALL,)), RESULT, Message("assistant", "as2")), (look_up,)),
    "reasoning, call": (
        (
            ASK,
            Message("assistant", "<think>\nre1\n</think>\n\n", (CALL,)),
            RESULT,
            Message("assistant", "<think>\nre2\n</think>\n\nas2"),
            MORE,
            Message("assistant", "<think>\nre3\n</think>\n\nas3"),
        ),
        (look_up,),
    ),
}
REFUSE_ALL = {"gptoss"}
"""Their turns end with a token of their own, at which engines stop only if the model's folder says so; the test's does not."""
AS_TRL = ("lfm2_v2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl")
"""Templates of which ``trl`` marks the same tokens in all chats, but for white space after the end token."""


T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine. `asyncio.run` would write its repr, which takes longer than what is tested."""
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await coroutine)

    asyncio.run(keep_result())
    return results[0]


def rows_of(renderer: ChatRenderer, name: str, turns: Any = "all") -> list[Row]:
    messages, tools = CHATS[name]
    return run(chat_rows(Chat("chats.jsonl, line 1", messages, tools, 0), renderer, turns)).rows


def trained_texts(renderer: ChatRenderer, rows: Sequence[Row]) -> list[str]:
    """Return each run of trained tokens as text."""
    texts = []
    for row in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask, [0]])))
        texts += [renderer.decode(row.token_ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return texts


class Engine:
    """Samples given turns, as an engine does in training."""

    def __init__(self, turns: Sequence[tuple[int, ...]]) -> None:
        self.turns = list(turns)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        ids = self.turns.pop(0)
        return Generation(ids, (-1.0,) * len(ids), FinishReason.STOP, ((0, 0),), request_id=request_id)

    async def abort(self, request_id: str) -> None: ...

    async def close_session(self, session_id: str) -> None: ...


async def sampled_rows(renderer: ChatRenderer, name: str, turns: Sequence[tuple[int, ...]]) -> list[Row]:
    """Return the rows of a conversation in which an engine samples these turns, in the order of the chat."""
    messages, tools = CHATS[name]
    state = EpisodeState("chat", 0)
    limits = Limits(99, 10**6, 1.0, 10**6)
    context = EpisodeContext(Env, renderer, Engine(turns), {}, limits, SamplingParams(max_new_tokens=10**6))
    conversation = Conversation(context, state, tools)
    at = [index for index, message in enumerate(messages) if message.role == "assistant"]
    conversation.begin(messages[: at[0]], "chat")
    for start, end in zip(at, [*at[1:], len(messages)], strict=True):
        said = await conversation.sample()
        assert said is not None
        new = [
            replace(message, tool_call_id=said.tool_calls[0].id) if message.role == "tool" else message
            for message in messages[start + 1 : end]
        ]
        conversation.answer(said, new, over=end == len(messages))
    return state.trajectory.rows("chat", "chat")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_training")])
def test_rows_and_masks_are_those_of_a_trajectory_that_samples_the_turns(name: str) -> None:
    """Layout: what is observed has mask 0; every assistant turn has mask 1, its end token included."""
    renderer = make_renderer(tokenizer(name))
    written = 0
    for chat in CHATS:
        try:
            rows = rows_of(renderer, chat)
        except ConfigError:
            continue
        written += 1
        texts = trained_texts(renderer, rows)
        turns = [tuple(renderer._encoder.template(text)) for text in texts]
        assert all(turn[-1] in renderer.end_token_ids for turn in turns)
        said = [message for message in CHATS[chat][0] if message.role == "assistant"]
        assert len(turns) == len(said)
        for message, text in zip(said, texts, strict=True):
            thought, _, answer = message.content.rpartition("</think>")
            expected = (
                thought.removeprefix("<think>").strip(),
                answer.strip(),
                *("look_up" for _ in message.tool_calls),
            )
            assert all(words in text for words in expected), text
        in_training = run(sampled_rows(renderer, chat, turns))
        assert [row.token_ids.tolist() for row in rows] == [row.token_ids.tolist() for row in in_training]
        assert [row.mask.tolist() for row in rows] == [row.mask.tolist() for row in in_training]
        assert [row.fork for row in rows] == [row.fork for row in in_training]
    assert written >= 1 or name in REFUSE_ALL


@pytest.mark.parametrize("name", AS_TRL)
@pytest.mark.parametrize("chat", CHATS)
def test_the_trained_tokens_are_those_that_trl_marks(name: str, chat: str) -> None:
    messages, tools = CHATS[chat]
    marked: Any = tokenizer(f"{name}_training").apply_chat_template(
        as_dicts(messages),
        tools=[tool_schema(tool) for tool in tools] or None,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    renderer = make_renderer(tokenizer(name))
    expected = [token for token, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask]
    trained = trained_texts(renderer, rows_of(renderer, chat))
    assert "".join(trained).replace("\n", "") == renderer.decode(expected).replace("\n", "")


def test_gpt_oss_is_written_with_the_end_tokens_of_its_folder() -> None:
    end = tokenizer("gptoss").convert_tokens_to_ids("<|return|>")
    renderer = make_renderer(tokenizer("gptoss"), RenderConfig(), [end])
    assert trained_texts(renderer, rows_of(renderer, "reasoning, call")) == [
        "<|channel|>analysis<|message|>re1<|end|><|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>"
        '{"word": "ar0"}<|call|>',
        "<|channel|>analysis<|message|>re2<|end|><|start|>assistant<|channel|>final<|message|>as2<|return|>",
        "<|channel|>analysis<|message|>re3<|end|><|start|>assistant<|channel|>final<|message|>as3<|return|>",
    ]


@pytest.mark.parametrize("name", ["qwen2.5", "glm-4"])
@given(conversation=well_formed(most_turns=3))
def test_a_row_is_what_the_format_writes_of_the_whole_chat(name: str, conversation: Any) -> None:
    messages, tools = conversation
    last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=0)
    if not last or any(
        message.role == "assistant" and not (message.content or message.tool_calls) for message in messages
    ):
        return
    renderer = make_renderer(family_tokenizer(name), RenderConfig(format=name))
    [row] = run(chat_rows(Chat("chats.jsonl, line 1", messages[: last + 1], tools, 0), renderer)).rows
    text = FORMATS[name](RenderConfig()).text(messages[: last + 1], tools, opener=False).rstrip("\n")
    written = renderer.decode(row.token_ids)
    assert written == text or written in (f"{text}<|user|>", f"{text}<|observation|>")
    assert len(trained_texts(renderer, [row])) == sum(message.role == "assistant" for message in messages[: last + 1])


def test_of_the_last_turn_alone_earlier_ones_are_observed() -> None:
    renderer = make_renderer(tokenizer("qwen2_5"))
    [everything], [last] = rows_of(renderer, "call"), rows_of(renderer, "call", "last")
    assert (everything.token_ids == last.token_ids).all()
    assert trained_texts(renderer, [last]) == ["as2<|im_end|>"]
    assert set(last.provenance[last.mask == 0]) == {Provenance.OBSERVED}
    [forked] = rows_of(make_renderer(tokenizer("qwen3")), "reasoning", "last")
    assert trained_texts(renderer, [forked]) == ["<think>\nre2\n</think>\n\nas2<|im_end|>"]


def convert(values: dict[str, Any], path: str = "chats.jsonl", **sft_keys: Any) -> Chat | None:
    data = DataConfig(apply_chat_template=sft_keys.pop("apply_chat_template", True))
    return ChatConversion(data, SftConfig(**sft_keys))(DataRow(Path(path), 3, values))


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL_OF_OPENAI = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "ar"}'}}
TOOL_OF_OPENAI = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}},
}


def test_a_row_of_messages() -> None:
    messages = [
        said("user", [{"type": "text", "text": "qa"}, {"type": "text", "text": "1"}]),
        said("assistant", None, reasoning_content="re1", tool_calls=[CALL_OF_OPENAI]),
        said("tool", "fo1", tool_call_id="c1", name="look_up"),
        said("assistant", "as1"),
        said("user", "not answered"),
    ]
    for row in (
        {"messages": messages, "tools": [TOOL_OF_OPENAI]},
        {"messages": json.dumps(messages), "tools": json.dumps([TOOL_OF_OPENAI["function"]])},
    ):
        chat = convert(row)
        assert chat is not None
        assert chat.messages == (
            ASK,
            Message("assistant", "<think>\nre1\n</think>\n\n", (ToolCall("c1", "look_up", {"word": "ar"}),)),
            Message("tool", "fo1", tool_call_id="c1"),
            Message("assistant", "as1"),
        )
        assert [(tool.name, tool.description) for tool in chat.tools] == [("look_up", "Looks up.")]
        assert chat.first == 0


def test_columns_of_parquet_fill_arguments_with_nulls() -> None:
    call = {"id": None, "function": {"name": "look_up", "arguments": {"word": "ar", "lines": None}}}
    row = {
        "messages": [said("user", "qa1"), said("assistant", "", tool_calls=[call], reasoning_content=None)],
        "tools": None,
    }
    for path, arguments in (("chats.parquet", {"word": "ar"}), ("chats.jsonl", {"word": "ar", "lines": None})):
        chat = convert(row, path)
        assert chat is not None
        assert chat.messages[1].tool_calls[0].arguments == arguments


def test_pairs_train_the_completion_alone() -> None:
    chat = convert({"prompt": "qa1", "completion": "as1"})
    assert chat is not None
    assert (chat.messages, chat.first) == ((ASK, Message("assistant", "as1")), 1)
    history = [said("user", "qa1"), said("assistant", "as1"), said("user", "qa2")]
    chat = convert({"prompt": history, "completion": [said("assistant", "as2")]})
    assert chat is not None
    assert chat.first == 3
    renderer = make_renderer(tokenizer("qwen2_5"))
    assert trained_texts(renderer, run(chat_rows(chat, renderer)).rows) == ["as2<|im_end|>"]
    raw = convert({"prompt": "qa1: ", "completion": "as1"}, apply_chat_template=False)
    assert raw is not None
    [row] = run(chat_rows(raw, renderer)).rows
    assert renderer.decode(row.token_ids) == "qa1: as1<|im_end|>"
    assert trained_texts(renderer, [row]) == ["as1<|im_end|>"]


def test_a_weight_of_a_completion_counts() -> None:
    completion = [said("assistant", "a", weight=0), said("user", "b"), said("assistant", "c")]
    assert convert({"prompt": "qa1", "completion": completion}).untrained == {1}


def test_columns_within_mappings(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    pair = {"question": "qa1", "answer": "as1", "chat": [said("user", "qa2"), said("assistant", "as2")], "tools": None}
    parquet.write_table(pa.Table.from_pylist([{"extra": pair, "more": "x"}]), path)
    data = DataConfig(path=path, input_key="extra.question")
    for sft_keys, texts in (
        ({"completion_key": "extra.answer"}, ["qa1", "as1"]),
        ({"messages_key": "extra.chat", "tools_key": "extra.tools"}, ["qa2", "as2"]),
    ):
        conversion = ChatConversion(data, SftConfig(**sft_keys))
        chat = conversion(open_table(path, "data.path", conversion.columns)[0])
        assert chat is not None
        assert [message.content for message in chat.messages] == texts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "qa1"}, r"has neither 'messages' \(sft.messages_key\) nor 'completion'.*the keys: text"),
        ({"messages": "qa1"}, r"'messages' \(sft.messages_key\) must be a text or a list of messages"),
        ({"messages": [said("user", "qa1")]}, "no message of the role assistant"),
        ({"messages": [said("assistant", "a"), said("user", "b"), said("assistant", "c")]}, "begins with a message of"),
        ({"prompt": "a", "completion": [said("assistant", "b", weight=0)]}, "train on whose weight is not 0"),
        ({"messages": [said("user", "qa1"), said("assistant", "")]}, "message 2 of the role assistant is empty"),
        (
            {"messages": [said("user", "a"), said("assistant", "b"), said("assistant", "c")]},
            "message 3 .* follows another",
        ),
        ({"messages": [said("bot", "a")]}, "message 1 has the role 'bot'"),
        ({"messages": [said("user", "a", reasoning="b")]}, "role 'user' and reasoning"),
        (
            {"messages": [said("user", "a"), said("assistant", "<think>b</think>c", reasoning="d")]},
            "message 2 has its reasoning twice",
        ),
        (
            {"messages": [said("user", [{"type": "image_url"}]), said("assistant", "b")]},
            "message 1 has a part for an image",
        ),
        (
            {"messages": [said("user", "a"), said("assistant", "b")], "tools": "look_up"},
            r"'tools' \(sft.tools_key\) is no JSON",
        ),
        ({"messages": [said("user", "a"), said("assistant", "b")], "tools": [{"name": 1}]}, "has the tool {'name': 1}"),
        ({"prompt": "qa1", "completion": [said("user", "b")]}, "no message of the role assistant"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"chats.jsonl, line 3.*{message}"):
        convert(row)


def test_calls_that_are_not_read_again_are_refused() -> None:
    renderer = make_renderer(tokenizer("qwen2_5"), RenderConfig(tool_parser="tags"))
    with pytest.raises(
        ConfigError, match=r"line 1: message 2 calls look_up, and .* no call is read; set render.tool_parser"
    ):
        rows_of(renderer, "call")


def test_a_preamble_writes_calls_that_the_template_has_no_place_for() -> None:
    renderer = make_renderer(family_tokenizer("chatml"), RenderConfig(format="chatml"))
    with pytest.raises(ConfigError, match="leaves out the tool call"):
        rows_of(renderer, "call")
    for parser, call in (
        ("hermes", '<tool_call>\n{"name": "look_up", "arguments": {"word": "ar0"}}\n</tool_call>'),
        ("tags", '<look_up>{"word": "ar0"}</look_up>'),
    ):
        config = RenderConfig(format="chatml", tool_preamble=True, tool_parser=parser)  # type: ignore[arg-type]
        renderer = make_renderer(family_tokenizer("chatml"), config)
        assert trained_texts(renderer, rows_of(renderer, "call")) == [f"{call}<|im_end|>", "as2<|im_end|>"]
        messages, tools = CHATS["call"]
        [row] = run(chat_rows(Chat("chats.jsonl, line 1", messages, tools, 3), renderer)).rows
        assert trained_texts(renderer, [row]) == ["as2<|im_end|>"]
        assert f"<|im_start|>assistant\n{call}<|im_end|>" in renderer.decode(row.token_ids), "of the prompt"


def write_chats(path: Path, count: int) -> Path:
    answers = [
        {"messages": [said("user", f"number {n}"), said("assistant", f"it is {n} " * (1 + 5 * (n % 3)))]}
        for n in range(count)
    ]
    path.write_text("\n".join(json.dumps(answer) for answer in answers))
    return path


def config(path: Path, *overrides: str) -> Config:
    fixed = ("model.path=multihop-warm", "sft.batch_size=4", "sft.workers=0", "learner.device=cpu", "learner.threads=1")
    return load_config(None, [f"data.path={path}", *fixed, "obs.tensorboard=false", *overrides])


def names(chats: Chats) -> list[list[str]]:
    return [
        [row.key.prompt_id.rpartition(" ")[2] for row in step.rows]
        for item in range(len(chats))
        for step in chats[item]
    ]


def test_every_chat_is_trained_once_an_epoch_in_another_order_each(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 10)
    run = prepare_sft(config(path, "sft.epochs=2"))
    assert isinstance(run.data, Chats)
    steps = names(run.data)
    assert [len(step) for step in steps] == [4] * 5
    flat = [name for step in steps for name in step]
    assert sorted(flat[:10]) == sorted(f"{n + 1}#0" for n in range(10))
    assert sorted(flat[10:]) == sorted(f"{n + 1}#1" for n in range(10))
    assert [name[:-2] for name in flat[:10]] != [name[:-2] for name in flat[10:]]
    assert names(Chats(run.config, run.data._make_renderer, run.data.file, 20)) == steps
    partial = prepare_sft(config(path, "sft.epochs=1"))
    assert [len(step) for step in names(partial.data)] == [4, 4, 2]  # type: ignore[arg-type]
    assert any("3 steps of 4 chats, 1 epochs" in line for line in partial.lines)


def test_later_epochs_train_the_rows_that_were_encoded_in_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare_sft(config(write_chats(tmp_path / "chats.jsonl", 4), "sft.epochs=2"))

    def token_ids() -> list[dict[str, Any]]:
        chats = Chats(run.config, run.data._make_renderer, run.data.file, 8)  # type: ignore[attr-defined]
        assert all(not pickle.loads(pickle.dumps(chats))._encoded for _ in chats[0]), "workers encode their own"
        return [{row.key.prompt_id[:-2]: row.token_ids for step in chats[item] for row in step.rows} for item in (0, 1)]

    first, second = token_ids()
    assert all(first[name] is second[name] for name in first)
    monkeypatch.setattr("agentrl.sft.chats.KEPT_TOKENS", 0)
    fresh, again = token_ids()
    assert not any(fresh[name] is again[name] for name in fresh)
    for ids in (second, fresh, again):
        assert {name: ids[name].tolist() for name in ids} == {name: first[name].tolist() for name in first}


def test_long_chats_are_left_out_and_counted_or_refused(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 9)
    plan = plan_sft(config(path, "sft.max_tokens=45"))
    [line] = [line for line in plan.lines if line.startswith("data ")]
    assert "3 left out by sft.max_tokens (the longest: " in line
    assert f"{path}, line 6, " in line
    assert "6 chats" in line
    long = {"messages": [said("user", "a"), said("assistant", "number " * 3000)]}
    path.write_text(path.read_text() + "\n" + json.dumps(long))
    with pytest.raises(
        ConfigError, match=r"chats\.jsonl, line 10 has [\d,]+ tokens, .* takes 2,048: set sft.max_tokens=2048"
    ):
        plan_sft(config(path))


def test_the_plan_states_model_and_memory(tmp_path: Path) -> None:
    lines = plan_sft(config(write_chats(tmp_path / "chats.jsonl", 4))).lines
    assert [line.split(maxsplit=1)[0] for line in lines] == ["model", "optimizer", "memory", "data", "length"]
    assert "1,869,760 weights" in lines[0]
    assert "GiB on each of 1 learner ranks" in lines[2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.streaming=true", "data.streaming=true: agentrl sft reads chats by number"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens=9: .* by sft.max_tokens"),
        ("sft.reseed_option=seed", "sft.reseed_option is set, which is for demonstrations"),
        ("sft.eval_share=0.01", "sft.eval_share=0.01 of the 4 chats .* is 0"),
    ],
)
def test_keys_that_do_not_fit_chats_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_sft(config(write_chats(tmp_path / "chats.jsonl", 4), override))


def test_steps_and_epochs_exclude_each_other(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 4)
    with pytest.raises(ConfigError, match=r"sft\.steps=2 and sft\.epochs=1 both say how long"):
        config(path, "sft.steps=2", "sft.epochs=1")
    with pytest.raises(ConfigError, match="demonstrations have no epochs"):
        load_config(None, ["tasks.name=multihop", "sft.epochs=1"])


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 12)
    settings = ("sft.epochs=2", "sft.eval_share=0.25", "sft.eval_every=2", "learner.optimizer.lr=1e-3")
    whole = config(path, *settings, f"run.dir={tmp_path / 'whole'}")
    sft(whole, note=lambda _: None)
    cut = config(path, *settings, f"run.dir={tmp_path / 'cut'}", "sft.save_every=1")

    def interrupt(line: str) -> None:
        if line.startswith("step 2/5"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunStopped, match=r"after 2 of 5 steps(.|\n)*agentrl sft --resume run\.dir="):
        sft(cut, note=interrupt)
    changed = config(path, *settings, f"run.dir={tmp_path / 'cut'}", "sft.seed=1")
    with pytest.raises(ConfigError, match=r"sft\.seed: 1000000 -> 1"):
        sft(changed, note=lambda _: None, resumed=tmp_path / "cut")
    sft(cut, note=lambda _: None, resumed=tmp_path / "cut")
    folders = [tmp_path / name for name in ("whole", "cut")]
    expected, resumed = (load_model(folder / "model", "float32").state_dict() for folder in folders)
    assert all((value == resumed[name]).all() for name, value in expected.items())
    metrics = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    for name in ("train/loss", "train/lr", "eval/loss", "eval/perplexity", "sft/epoch"):
        assert [row.get(name) for row in metrics[0]] == [row.get(name) for row in metrics[1]], name
    losses = [row["eval/loss"] for row in metrics[0] if "eval/loss" in row]
    assert [row["step"] for row in metrics[0] if "eval/loss" in row] == [2, 4, 5]
    assert losses[-1] < losses[0]
    assert metrics[0][-1]["eval/perplexity"] == pytest.approx(np.exp(losses[-1]), rel=1e-6)
