"""The embedded engine with images: its log-probabilities are those of transformers' own forward with the same pixels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.core.images import Image, load_image
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.inference.embedded.request import GenerateInput, SamplingOptions, parse_generate
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.models.load import load_model, load_tokenizer
from tests.vision_folders import FAMILIES, write_processor_folder

TOLERANCE = 1e-4
"""As of text."""
FAMILY = pytest.mark.parametrize("family", FAMILIES)
Generate = Callable[..., Awaitable[dict[str, Any]]]


@cache
def folder(family: str) -> Path:
    """A model whose log-probabilities depend on the pixels: weights are larger than those of a new model."""
    return write_processor_folder(Path(mkdtemp()), family, weights=0.2)


@cache
def engine(family: str) -> Model:
    return Model(folder(family), torch.float32, 6, 1024)


@cache
def reference(family: str) -> Any:
    return load_model(folder(family))


def picture(width: int, height: int, seed: int) -> Image:
    from PIL import Image as pil

    return load_image(pil.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


@dataclass
class Conversation:
    """The ids of an episode, the tokens of its images in full, and its images."""

    family: str
    ids: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    def add(self, source: random.Random, *images: Image) -> None:
        """Append text with images between."""
        for image in images:
            self.ids += [source.randrange(2, 200) for _ in range(source.randrange(1, 6))]
            self.ids += encoder(self.family).processor.expand(image)
            self.images.append(image)
        self.ids += [source.randrange(2, 200) for _ in range(source.randrange(1, 6))]


def encoder(family: str) -> Any:
    return engine(family).images


def reference_logprobs(family: str, ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
    """Log-probabilities ``[T, V]`` after each token, of transformers' own forward."""
    processor, token = encoder(family).processor, encoder(family).positions.image_token_id
    row = torch.tensor([list(ids)])
    inputs = dict(processor.join([processor.features(image) for image in images]))
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (row == token).int()
    with torch.inference_mode():
        logits = reference(family)(input_ids=row, **inputs).logits[0]
    return logits.float().log_softmax(-1)


def play(model: Model, body: Callable[[Generate], Awaitable[None]]) -> None:
    """Run a scheduler over the model; ``body`` gets a function that generates."""
    scheduler = Scheduler(model, StopMatcher(load_tokenizer(model.folder), model.vocabulary), 5, 0, "0")

    async def generate(ids: Sequence[int], images: Sequence[Image], count: int = 6, **fields: Any) -> dict[str, Any]:
        options = SamplingOptions(max_new_tokens=count, temperature=0.0, ignore_eos=True)
        request = scheduler.submit(GenerateInput([*ids], options, "r", logprobs=True, images=tuple(images), **fields))
        await request.done
        return scheduler.reply(request)

    async def run() -> None:
        loop = asyncio.create_task(scheduler.run())
        try:
            await body(generate)
        finally:
            loop.cancel()

    asyncio.run(run())


@FAMILY
def test_five_pictures_over_four_turns(family: str) -> None:
    """Log-probabilities and greedy tokens of an episode; the fourth picture is the first again."""
    source, conversation = random.Random(0), Conversation(family)
    first = picture(52, 40, 1)
    turns = ((first, picture(40, 60, 2)), (picture(32, 32, 3),), (first, picture(64, 30, 4)), ())
    sampled: list[tuple[int, float]] = []
    computed = encoder(family).computed

    async def episode(generate: Generate) -> None:
        for number, images in enumerate(turns):
            known = len(conversation.ids)
            conversation.add(source, *images)
            reply = await generate(conversation.ids, conversation.images)
            if number:
                assert reply["meta_info"]["cached_tokens"] >= known - 1
            entries = reply["meta_info"]["output_token_logprobs"]
            sampled.extend((len(conversation.ids) + at, entry[0]) for at, entry in enumerate(entries))
            conversation.ids += reply["output_ids"]

    play(engine(family), episode)
    assert len(conversation.images) == 5
    assert encoder(family).computed - computed == 4, "an image that returns is not computed again"
    logprobs = reference_logprobs(family, conversation.ids, conversation.images)
    expected = [float(logprobs[at - 1, conversation.ids[at]]) for at, _ in sampled]
    np.testing.assert_allclose([logprob for _, logprob in sampled], expected, atol=TOLERANCE)
    assert all(int(logprobs[at - 1].argmax()) == conversation.ids[at] for at, _ in sampled)
    others = [picture(52, 40, 9), *conversation.images[1:]]
    assert (reference_logprobs(family, conversation.ids, others) - logprobs)[-1].abs().max() > 0.01, "pixels count"


@FAMILY
def test_equal_ids_of_different_images_are_not_a_shared_prefix(family: str) -> None:
    """One text with two images of equal size in turn, and the first again: its prefix is found then."""
    source, conversation = random.Random(1), Conversation(family)
    images = [picture(48, 48, seed) for seed in (5, 6)]
    conversation.add(source, images[0])
    start = conversation.ids.index(encoder(family).positions.image_token_id)

    async def body(generate: Generate) -> None:
        replies = [await generate(conversation.ids, [image], 1) for image in (*images, images[0])]
        cached = [reply["meta_info"]["cached_tokens"] for reply in replies]
        assert cached[1] <= start
        assert cached[2] == len(conversation.ids) - 1
        for image, reply in zip((*images, images[0]), replies, strict=True):
            logprob, token, _ = reply["meta_info"]["output_token_logprobs"][0]
            expected = reference_logprobs(family, conversation.ids, [image])[-1]
            assert logprob == pytest.approx(float(expected[token]), abs=TOLERANCE)
        assert abs(replies[0]["meta_info"]["output_token_logprobs"][0][0]
                   - replies[1]["meta_info"]["output_token_logprobs"][0][0]) > 10 * TOLERANCE  # fmt: skip

    play(engine(family), body)


@FAMILY
def test_scores_from_within_an_image_and_requests_at_once(family: str) -> None:
    """A scored row whose cached prefix ends among the tokens of an image, next to a request of text and one with images."""
    source, conversation = random.Random(2), Conversation(family)
    conversation.add(source, picture(48, 40, 7), picture(33, 50, 8))
    pads = [at for at, token in enumerate(conversation.ids) if token == encoder(family).positions.image_token_id]
    start = pads[1]

    async def body(generate: Generate) -> None:
        await generate(conversation.ids, conversation.images, 1)
        replies = await asyncio.gather(
            generate(conversation.ids, conversation.images, score_from=start),
            generate(conversation.ids[: pads[0]], []),
            generate([5, 6, *conversation.ids], conversation.images),
        )
        assert replies[0]["meta_info"]["cached_tokens"] == start
        with pytest.raises(
            BadRequestError, match=r"logprob_start_len=\d+ is not the index of one of the \d+ input_ids"
        ):
            await generate(conversation.ids, conversation.images, score_from=len(conversation.ids))
        scores = [entry[0] for entry in replies[0]["meta_info"]["input_token_logprobs"]][1:]
        logprobs = reference_logprobs(family, conversation.ids, conversation.images)
        expected = [float(logprobs[at - 1, conversation.ids[at]]) for at in range(start + 1, len(conversation.ids))]
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE)
        rows = (conversation.ids[: pads[0]], []), ([5, 6, *conversation.ids], conversation.images)
        for (ids, images), reply in zip(rows, replies[1:], strict=True):
            row = [*ids, *reply["output_ids"]]
            expected_row = reference_logprobs(family, row, images)
            entries = reply["meta_info"]["output_token_logprobs"]
            np.testing.assert_allclose(
                [entry[0] for entry in entries],
                [float(expected_row[at - 1, row[at]]) for at in range(len(ids), len(row))],
                atol=TOLERANCE,
            )

    play(engine(family), body)


@FAMILY
def test_prompts_with_one_token_an_image_are_expanded(family: str) -> None:
    """SGLang's form of ``input_ids``; the reply has the ids in full."""
    source, conversation = random.Random(3), Conversation(family)
    image = picture(40, 40, 3)
    conversation.add(source, image)
    processor = encoder(family).processor
    expansion = list(processor.expand(image))
    at = next(at for at in range(len(conversation.ids)) if conversation.ids[at : at + len(expansion)] == expansion)
    short = [*conversation.ids[:at], processor.placeholder_id, *conversation.ids[at + len(expansion) :]]

    async def body(generate: Generate) -> None:
        reply = await generate(short, [image], 1, returns_prompt=True)
        assert reply["prompt_token_ids"] == conversation.ids
        assert reply["meta_info"]["prompt_tokens"] == len(conversation.ids)
        assert "prompt_token_ids" not in await generate(conversation.ids, [image], 1)
        with pytest.raises(BadRequestError, match=r"input_ids have \d+ image tokens .* the 2 images"):
            await generate(conversation.ids, [image, picture(90, 30, 1)])

    play(engine(family), body)


def test_a_sampled_image_token_is_text() -> None:
    """With ``image_spans`` image tokens elsewhere are those of text: a policy may sample one."""
    family = "qwen2.5-vl"
    source, conversation = random.Random(4), Conversation(family)
    token = encoder(family).positions.image_token_id
    conversation.add(source, picture(40, 40, 3))
    pads = [at for at, index in enumerate(conversation.ids) if index == token]
    ids, images = [*conversation.ids, token, 7], conversation.images

    async def body(generate: Generate) -> None:
        with pytest.raises(BadRequestError, match="image tokens"):
            await generate(ids, images)
        reply = await generate(ids, images, 1, image_spans=((pads[0] - 1, len(pads) + 2),))
        assert reply["meta_info"]["prompt_tokens"] == len(ids)
        with pytest.raises(BadRequestError, match=r"image_spans=.* the 1 images have"):
            await generate(ids, images, 1, image_spans=((pads[0] + 1, len(pads)),))

    play(engine(family), body)


def test_new_weights_of_the_vision_tower_compute_images_again() -> None:
    family = "qwen3-vl"
    model = Model(folder(family), torch.float32, 3, 512)
    source, conversation = random.Random(5), Conversation(family)
    conversation.add(source, picture(40, 40, 3))
    name = "model.visual.patch_embed.proj.weight"
    weight = dict(model.parameters())[name]
    logprobs = []

    async def body(generate: Generate) -> None:
        for factor in (1.0, 3.0):
            model.load_weights([(name, weight * factor)])
            reply = await generate(conversation.ids, conversation.images, 1, extra_key=str(factor))
            logprobs.append(reply["meta_info"]["output_token_logprobs"][0])

    play(model, body)
    assert model.images is not None
    assert model.images.computed == 3, "once in the check at load"
    assert abs(logprobs[0][0] - logprobs[1][0]) > TOLERANCE


def test_fields_of_a_body() -> None:
    image = picture(8, 8, 0)
    inputs, _ = parse_generate({"input_ids": [1], "image_data": [image.data_url], "return_prompt_token_ids": True})
    assert inputs[0].images == (image,)
    assert inputs[0].returns_prompt
    inputs, _ = parse_generate({"input_ids": [[1], [2]], "image_data": [None, [image.data_url, image.data_url]]})
    assert [len(generate_input.images) for generate_input in inputs] == [0, 2]
    for fields, message in (
        ({"image_data": ["/etc/passwd"]}, "image_data"),
        ({"image_data": [{"url": "x"}]}, "takes data: URLs and base64"),
        ({"image_spans": [[1]]}, r"list of \[first token, number of tokens\]"),
    ):
        with pytest.raises(BadRequestError, match=message):
            parse_generate({"input_ids": [1], **fields})
