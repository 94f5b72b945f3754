"""The shipped policy sees: its answers are right on held-out pictures, and at chance where pictures are shuffled among tasks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agentrl_envs.geometry import GeometryEnv
from agentrl_tasks.geometry import Geometry
from agentrl_tasks.geometry.make_policy import (
    IMAGE_PAD,
    MERGE,
    PATCH_PX,
    VIEW_PX,
    VISION_END,
    VISION_START,
    save_policy,
)
from agentrl_tasks.geometry.policies import WARM
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

KINDS = ("compare", "color", "locate")
"""Kinds that the policy answers without zooming, and has learned."""
CHANCE = (1 / 3 + 1 / 6 + 1 / 16) / 3
TOKENS = (VIEW_PX // PATCH_PX // MERGE) ** 2


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any, Any]:
    model: Any = AutoModelForImageTextToText
    return (
        model.from_pretrained(WARM, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(WARM),
        AutoImageProcessor.from_pretrained(WARM, backend="pil"),
    )


def right_share(policy: tuple[Any, Any, Any], count: int, *, shuffle_pictures: bool) -> float:
    """Return how often the most probable tokens are the answer's."""
    model, tokenizer, processor = policy
    right = []
    for task in Geometry(kinds=KINDS, shuffle_pictures=shuffle_pictures).split("eval")[:count]:
        env = GeometryEnv(view_px=VIEW_PX, prompt="{picture}{question}")
        [message], _ = env.reset(options={"task": task})
        parts = [{"type": "image"}, {"type": "text", "text": message.content[1:]}]
        tools = [{"function": {"name": "zoom", "parameters": env.tools[0].parameters}}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tools=tools, add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer(text.replace(IMAGE_PAD, IMAGE_PAD * TOKENS)).input_ids
        answer = tokenizer(task.answer + "<|im_end|>").input_ids
        ids = torch.tensor([prompt + answer])
        features = processor(images=[message.images[0].to_pil()], return_tensors="pt")
        is_image = (ids == tokenizer.convert_tokens_to_ids(IMAGE_PAD)).long()
        assert int(is_image.sum()) == TOKENS == features["image_grid_thw"].prod() // MERGE**2
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=is_image, **features).logits[0]
        right.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer)
    return float(np.mean(right))


def test_it_is_right_on_held_out_pictures_and_at_chance_on_shuffled_ones(policy: tuple[Any, Any, Any]) -> None:
    assert right_share(policy, 48, shuffle_pictures=False) > 0.75
    assert abs(right_share(policy, 96, shuffle_pictures=True) - CHANCE) < 0.15


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in WARM.iterdir()) < 3_000_000


def test_the_recipe_makes_its_tokenizer_and_architecture(tmp_path: Path, policy: tuple[Any, Any, Any]) -> None:
    save_policy(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in WARM.iterdir())
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (WARM / name).read_bytes(), name
    tokenizer = policy[1]
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in (VISION_START, VISION_END)] == [
        VISION_START,
        VISION_END,
    ]
