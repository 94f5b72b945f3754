"""Pictures that agent programs send: the same messages from every dialect, refusals by name, one row with each image once."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import ADD, CALL, Program, answer, make_test_renderer, play_with
from PIL import Image as pil

from agentrl.clients.chat_messages import conversation_to_wire
from agentrl.core.images import IMAGE_MARK, load_image
from agentrl.core.types import Message, message_with_images
from agentrl.gateway.dialects.base import BadRequestError, Dialect
from agentrl.gateway.dialects.chat_completions import ChatCompletions
from agentrl.gateway.dialects.messages import Messages
from agentrl.gateway.dialects.responses import Responses
from agentrl.gateway.joining import History
from agentrl.gateway.program_process import plain_messages
from agentrl.obs.image_files import image_name
from agentrl.obs.rollout_format import encode_rollout, rollout_from_dict
from agentrl.render.registry import load_renderer
from tests.vision_folders import write_processor_folder

RED, BLUE = (load_image(pil.new("RGB", (30, 30), colour)) for colour in ("red", "blue"))
BROKEN = load_image(RED.data[:40])
URL = RED.data_url


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def source(url: str) -> dict[str, Any]:
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def test_pictures_of_users_and_tools_are_the_same_in_every_dialect() -> None:
    call: dict[str, Any] = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": [text("a"), text("b"), image_url(URL), text(IMAGE_MARK), image_url(BLUE.data_url)]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0_0", "content": [image_url(BLUE.data_url), text("cut")]},
    ]
    said = [text("a"), text("b"), source(URL), text(IMAGE_MARK), source(BLUE.data_url)]
    result = {"type": "tool_result", "tool_use_id": "call_0_0", "content": [source(BLUE.data_url), text("cut")]}
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_0_0", "name": "add", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    typed = "input_text"
    items = [
        {"role": "user", "content": [text("a", typed), text("b", typed), input_image(URL), text(IMAGE_MARK, typed),
                                     input_image(BLUE.data_url)]},
        {"type": "function_call", "call_id": "call_0_0", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_0_0", "output": [input_image(BLUE.data_url), text("cut", typed)]},
    ]  # fmt: skip
    user_message = message_with_images("user", "a\nb", RED, "\N{REPLACEMENT CHARACTER}", BLUE)
    tool = message_with_images("tool", BLUE, "cut")
    for dialect, body in ((ChatCompletions(), {"messages": chat}), (Messages(), {"messages": messages}),
                          (Responses(), {"input": items})):  # fmt: skip
        first, _, last = dialect.request(body).messages
        assert first == user_message, dialect
        assert (last.content, last.images, last.tool_call_id) == (tool.content, tool.images, "call_0_0"), dialect
        assert ChatCompletions().request({"messages": conversation_to_wire([first])}).messages == (first,)


@pytest.mark.parametrize(
    ("dialect", "parts", "words"),
    [
        (
            ChatCompletions(),
            [image_url("https://x.org/a.png")],
            r"image_url='https://x.org/a.png': images are not fetched",
        ),
        (ChatCompletions(), [image_url("/etc/hostname")], "image_url='/etc/hostname': images are not fetched"),
        (ChatCompletions(), [image_url("data:image/png;base64,aGk=")], "image_url: an image must be bytes of PNG"),
        (ChatCompletions(), [{"type": "image_url"}], "image_url=None: images are not fetched"),
        (ChatCompletions(), [{"type": "input_audio"}], "content of type 'input_audio' is not supported here"),
        (
            Messages(),
            [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}],
            r"image.source.url='http://x/y'",
        ),
        (Messages(), [{"type": "image", "source": {"type": "file", "file_id": "f"}}], r"image.source.type='file'"),
        (Messages(), [{"type": "document"}], "content of type 'document' is not supported here"),
        (Responses(), [input_image("http://x/y")], "input_image.image_url='http://x/y': images are not fetched"),
        (Responses(), [{"type": "input_image", "file_id": "f"}], "input_image with file_id='f' is not supported"),
    ],
)
def test_what_is_no_picture_of_the_request_is_refused_by_name(dialect: Dialect, parts: list[Any], words: str) -> None:
    key = "input" if isinstance(dialect, Responses) else "messages"
    with pytest.raises(BadRequestError, match=words):
        dialect.request({key: [{"role": "user", "content": parts}]})
    if not isinstance(dialect, Messages):
        with pytest.raises(BadRequestError, match="is not supported here"):
            dialect.request({key: [{"role": "assistant", "content": [*parts]}]})


def test_messages_with_other_pictures_have_another_meaning() -> None:
    red, blue, again = (
        History([message_with_images("user", "a", image)], ()) for image in (RED, BLUE, load_image(RED.data))
    )
    assert red.whole == again.whole
    assert red.whole[1] != blue.whole[1]
    assert History([Message("user", "a" + IMAGE_MARK)], ()).whole[1] != red.whole[1]


def test_an_episode_with_pictures_is_one_row_with_each_image_once(tmp_path: Path) -> None:
    renderer = load_renderer(write_processor_folder(tmp_path, "qwen2.5-vl"))
    assert renderer.images.expand(RED), "loaded before the episode's time runs"

    async def talk(program: Program) -> None:
        refused = await program.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": [image_url(BROKEN.data_url)]}]}
        )
        assert refused.status_code == 400
        assert "cannot be decoded" in refused.text
        messages: list[dict[str, Any]] = [{"role": "user", "content": [image_url(URL), text("add")]}]
        reply = await program.chat(*messages, tools=[ADD])
        messages += [reply, answer(reply["tool_calls"][0], "") | {"content": [text("cut"), image_url(BLUE.data_url)]}]
        reply = await program.chat(*messages, tools=[ADD])
        messages += [reply, {"role": "user", "content": [image_url(URL)]}]
        await program.chat(*messages, tools=[ADD])

    played = play_with(renderer, [CALL, "Blue.", "Red."], talk, max_seconds=300.0)
    rollout = played.rollout
    assert rollout.failure is None, rollout.failure
    [row] = rollout.rows
    assert [span.digest for span in row.images] == [RED.digest, BLUE.digest, RED.digest]
    assert rollout.images == {RED.digest: RED, BLUE.digest: BLUE}
    pads = sum(token in renderer.images.pad_ids for token in row.token_ids.tolist())
    assert pads == sum(
        sum(token in renderer.images.pad_ids for token in renderer.images.expand(image)) for image in (RED, BLUE, RED)
    )
    assert not any(row.mask[span.start : span.end].any() for span in row.images)
    files = {image_name(image): image for image in rollout.images.values()}
    read = rollout_from_dict(json.loads(encode_rollout(rollout)), files.__getitem__)
    assert (read.images, read.rows[0].images) == (rollout.images, row.images)


def test_a_policy_that_reads_text_only_refuses_pictures() -> None:
    async def talk(program: Program) -> None:
        refused = await program.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": [image_url(URL)]}]}
        )
        assert refused.status_code == 400
        assert "reads text only; set model.path to a vision-language model" in refused.text
        await program.chat({"role": "user", "content": "a"})

    assert partial(play_with, make_test_renderer())(["Yes."], talk).rollout.failure is None


def test_programs_read_pictures_of_their_task_as_parts() -> None:
    message = message_with_images("user", RED, "How many?")
    assert plain_messages([message, Message("user", "a")]) == [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, text("How many?")]},
        {"role": "user", "content": "a"},
    ]
