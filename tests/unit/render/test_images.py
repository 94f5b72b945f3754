"""Conversations with images: the tokens of each image once, where the chat template has its place, rendered or appended."""

import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from PIL import Image as pil

from agentrl.config.model import RenderConfig
from agentrl.core.errors import ConversationError
from agentrl.core.images import Image, load_image
from agentrl.core.types import Message, Prompt, message_with_images
from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer
from tests.vision_folders import FAMILIES, write_processor_folder

FAMILY = pytest.mark.parametrize("family", FAMILIES)
TURNS = {"smolvlm": " A cat."}
"""What the policy says: this template of SmolVLM writes a space before it."""


@cache
def renderer_of(family: str) -> ChatRenderer:
    return load_renderer(write_processor_folder(Path(mkdtemp()), family))


def picture(rng: random.Random) -> Image:
    shape = (rng.randint(4, 90), rng.randint(4, 90), 3)
    return load_image(pil.fromarray(np.random.default_rng(rng.getrandbits(32)).integers(0, 256, shape, np.uint8)))


def user_message(rng: random.Random, images: int) -> Message:
    texts = ["Look:", " and ", "\n", "How many?", " <|image_pad|><image> "]
    parts = [part for _ in range(images) for part in (rng.choice(texts), picture(rng))]
    return message_with_images("user", *parts, rng.choice(texts))


def require_each_image_once(renderer: ChatRenderer, prompt: Prompt, images: list[Image]) -> None:
    assert [placed.image for placed in prompt.images] == images
    pads = 0
    for placed in prompt.images:
        ids = prompt.token_ids[placed.span.start : placed.span.end]
        assert ids == tuple(renderer.images.expand(placed.image))
        assert placed.span.digest == placed.image.digest
        pads += sum(token in renderer.images.pad_ids for token in ids)
    assert sum(token in renderer.images.pad_ids for token in prompt.token_ids) == pads, "no pad stands for nothing"


@FAMILY
@pytest.mark.parametrize("seed", range(3))
def test_appended_turns_are_what_the_template_writes(family: str, seed: int) -> None:
    """Five pictures in several turns; what was sampled between them ends as the template ends it."""
    rng, renderer = random.Random(seed), renderer_of(family)
    history = [user_message(rng, rng.randint(1, 2))]
    row = renderer.render(history)
    for count in (1, 0, 2):
        sampled = renderer.encode(TURNS.get(family, "A cat.")) + (
            () if family == "glm-4.5v" else (renderer.end_token_id,)
        )
        message = renderer.parse(sampled)
        new = user_message(rng, count)
        added = renderer.bridge((*history, message), sampled, (new,))
        assert isinstance(added, Prompt), added
        earlier = len(row.token_ids) + len(sampled)
        row = Prompt(
            (*row.token_ids, *sampled, *added.token_ids),
            (*row.images, *(placed.shift(earlier) for placed in added.images)),
        )
        history += [message, new]
        require_each_image_once(renderer, row, [image for said in history for image in said.images])
        written = [Message("assistant", said.content.strip()) if said.token_ids else said for said in history]
        assert row == renderer.render(written), "0 drift"


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "glm-4.5v"])
def test_pictures_of_tools_arrive(family: str) -> None:
    renderer, rng = renderer_of(family), random.Random(5)
    answer = message_with_images("tool", "cut:", picture(rng))
    prompt = renderer.render([Message("user", "Cut."), Message("assistant", "Yes."), answer])
    require_each_image_once(renderer, prompt, list(answer.images))


def test_pictures_that_a_template_leaves_out_are_refused_by_role(tmp_path: Path) -> None:
    drops = FAMILIES["qwen2.5-vl"].template.replace(
        "write(m.content)", "(write(m.content) if m.role != 'tool' else 'cut')"
    )
    parts = (
        "{%- macro write(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
        "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    )
    renderer = load_renderer(write_processor_folder(tmp_path / "model", "qwen2.5-vl", template=parts + drops))
    answer = message_with_images("tool", picture(random.Random(1)))
    with pytest.raises(ConversationError, match=r"1 of 1 images of message 3 \(tool\)"):
        renderer.render([Message("user", "Cut."), Message("assistant", "Yes."), answer])


def test_what_has_no_place_for_images_is_refused(tmp_path: Path) -> None:
    folder = write_processor_folder(tmp_path / "model", "qwen2.5-vl")
    image = message_with_images("user", picture(random.Random(2)))
    with pytest.raises(ConversationError, match=r"render\.format=chatml does not write"):
        load_renderer(folder, RenderConfig(format="chatml")).render([image])
    inline = Message("user", image.content, inline=True, images=image.images)
    with pytest.raises(ConversationError, match="inline message or raw prompt has images"):
        load_renderer(folder).render([Message("user", "x"), inline])
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    with pytest.raises(ConversationError, match=r"reads text only; set model\.path"):
        load_renderer(folder).render([image])


def test_a_placeholder_that_the_policy_sampled_is_no_image() -> None:
    renderer, rng = renderer_of("qwen3-vl"), random.Random(3)
    first = user_message(rng, 1)
    sampled = (*renderer.encode("x"), renderer.images.placeholder_id, renderer.end_token_id)
    added = renderer.bridge((first, renderer.parse(sampled)), sampled, (user_message(rng, 1),))
    assert isinstance(added, Prompt)
    assert len(added.images) == 1
    prompt = renderer.render((first, renderer.parse(sampled), Message("user", "?")))
    require_each_image_once(renderer, prompt, list(first.images))
