"""The SDKs of OpenAI and Anthropic, unmodified, send pictures to a policy that sees, on the embedded engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl_envs.geometry import GeometryEnv
from agentrl_tasks.geometry import Geometry
from agentrl_tasks.geometry.policies import WARM
from gateway_episodes import EngineSampler
from PIL import Image as pil
from program_episodes import play_program
from transformers import AutoModelForImageTextToText

from agentrl import Image, Message, Task, load_image
from agentrl.config.agent import AgentConfig
from agentrl.config.sampler import EmbeddedConfig
from agentrl.config.schema import Config
from agentrl.core.types import Row
from agentrl.episode.limits import Limits
from agentrl.inference.launch.processes import launch_embedded
from agentrl.models.image_processor import load_image_processor
from agentrl.runtime.episodes import open_renderer

pytestmark = pytest.mark.agents

LIMITS = Limits(max_turns=8, max_tokens=400, max_seconds=300.0, max_new_tokens=32)
PROGRAM = """
import json, os, sys

dialect, stream = sys.argv[1], sys.argv[2] == "stream"
with open(os.environ["AGENTRL_TASK"]) as file:
    task = json.load(file)
[prompt], zoomed, model = task["prompt"], task["metadata"]["zoomed"], os.environ["OPENAI_MODEL"]
box = {"type": "array", "items": {"type": "integer"}}
schema = {"type": "object", "properties": {"box": box}, "required": ["box"]}
tool = {"name": "zoom", "description": "Zoom.", "parameters": schema}


def chat():
    import openai

    client, messages = openai.OpenAI(), [prompt]
    request = {"model": model, "tools": [{"type": "function", "function": tool}]}
    for _ in range(4):
        if stream:
            with client.chat.completions.stream(messages=messages, **request) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(messages=messages, **request).choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for call in messages[-1]["tool_calls"]:
            call["function"] = {key: call["function"][key] for key in ("name", "arguments")}
            content = [{"type": "image_url", "image_url": {"url": zoomed}}]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def responses():
    import openai

    def part(item):
        if item["type"] == "text":
            return {"type": "input_text", "text": item["text"]}
        return {"type": "input_image", "image_url": item["image_url"]["url"]}

    client, items = openai.OpenAI(), [{"role": "user", "content": [part(item) for item in prompt["content"]]}]
    request = {"model": model, "tools": [{"type": "function", **tool}], "store": False}
    for _ in range(4):
        if stream:
            with client.responses.stream(input=items, **request) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(input=items, **request)
        items += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return
        for call in calls:
            output = [{"type": "input_image", "image_url": zoomed}]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def messages():
    import anthropic

    def image(url):
        media_type, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}

    blocks = [item if item["type"] == "text" else image(item["image_url"]["url"]) for item in prompt["content"]]
    client, messages = anthropic.Anthropic(), [{"role": "user", "content": blocks}]
    tools = [{"name": "zoom", "description": "Zoom.", "input_schema": schema}]
    for _ in range(4):
        request = {"model": model, "messages": messages, "tools": tools, "max_tokens": 32}
        if stream:
            with client.messages.stream(**request) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**request)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return
        content = [image(zoomed)]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": content} for call in calls]
        messages.append({"role": "user", "content": results})


{"chat": chat, "responses": responses, "messages": messages}[dialect]()
"""


@pytest.fixture
def engine_url(bin_folder: Path, tmp_path: Path) -> Iterator[str]:
    """An engine with the policy, in the network of the programs."""
    engine = launch_embedded(WARM, EmbeddedConfig(slots=1, context=512, threads=1), log=tmp_path / "engine.log")
    yield engine.url
    engine.stop()


def question() -> Message:
    """Return a question that the policy zooms for, with its picture."""
    [task] = Geometry(kinds=["read"]).split("eval")[:1]
    observation, _ = GeometryEnv(view_px=32, prompt="{picture}{question}").reset(options={"task": task})
    assert isinstance(observation, tuple)
    [message] = observation
    return message


def transformers_logprobs(row: Row, images: Sequence[Image]) -> np.ndarray:
    """Return the log-probabilities ``[T]`` of a row's tokens, 0 for the first."""
    processor, model = (
        load_image_processor(WARM),
        AutoModelForImageTextToText.from_pretrained(WARM, dtype=torch.float32),
    )
    ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    is_image = torch.isin(ids, torch.tensor([*processor.pad_ids])).long()
    inputs: Any = processor.join([processor.features(image) for image in images])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, mm_token_type_ids=is_image, **inputs).logits[0]
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([[0.0], logprobs])


@pytest.mark.parametrize("bin_folder", ["sdks"], indirect=True)
def test_every_sdk_sends_pictures_to_a_policy_that_sees(bin_folder: Path, engine_url: str, tmp_path: Path) -> None:
    """The same row in every dialect, whole and streamed: each picture once, in the tokens of the policy's processor; sampled
    tokens and their log-probabilities are the engine's, and those of transformers for the pixels.
    """
    renderer, vocabulary = open_renderer(Config(), WARM)
    message, zoomed = question(), load_image(pil.new("RGB", (32, 32), "red"))
    task = Task("t", (message,), metadata={"zoomed": zoomed.data_url})
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    rows = []
    for dialect in ("chat", "responses", "messages"):
        for how in ("whole", "stream"):
            sampler = EngineSampler(engine_url, vocabulary)
            config = AgentConfig(command=f"{bin_folder / 'python'} {path} {dialect} {how}")
            rollout, generations = play_program(config, sampler, renderer, task=task, limits=LIMITS, temperature=0.0)
            assert rollout.failure is None, (dialect, how, rollout.failure)
            [row] = rollout.rows
            assert rollout.images == {image.digest: image for image in (*message.images, zoomed)}
            assert row.token_ids[row.mask == 1].tolist() == [token for g in generations for token in g.token_ids]
            for request in sampler.requests:
                prompt = request.prompt.token_ids
                assert row.token_ids[: len(prompt)].tolist() == list(prompt), "nothing is rendered again"
            rows.append(row)
    for row in rows[1:]:
        for name in ("token_ids", "mask", "mask_reason", "logprobs", "provenance"):
            assert np.array_equal(getattr(row, name), getattr(rows[0], name)), name
        assert row.images == rows[0].images
    row, images = rows[0], [*message.images, *[zoomed] * (len(rows[0].images) - 1)]
    assert len(images) > 1, "the policy zooms"
    assert [span.digest for span in row.images] == [image.digest for image in images]
    for span, image in zip(row.images, images, strict=True):
        assert row.token_ids[span.start : span.end].tolist() == list(renderer.images.expand(image))
        assert not row.mask[span.start : span.end].any()
    at = np.flatnonzero(row.mask)
    np.testing.assert_allclose(row.logprobs[at], transformers_logprobs(row, images)[at], atol=1e-4)
