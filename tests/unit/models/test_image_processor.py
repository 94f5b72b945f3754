"""Piecewise expansion against the processor's own, over families, sizes, aspect ratios, counts and orders."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

from agentrl.core.errors import ConversationError, ModelError
from agentrl.core.images import Image, load_image
from agentrl.models.image_processor import ImageProcessor, has_image_processor, load_image_processor
from tests.vision_folders import FAMILIES, write_processor_folder

FAMILY = pytest.mark.parametrize("family", FAMILIES)


@cache
def processor(family: str) -> ImageProcessor:
    return load_image_processor(write_processor_folder(Path(mkdtemp()), family))


def picture(width: int, height: int, seed: int = 0) -> Image:
    from PIL import Image as pil

    return load_image(pil.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


@FAMILY
@pytest.mark.parametrize("seed", range(4))
def test_conversation_equals_its_images_one_by_one(family: str, seed: int) -> None:
    rng, expander = random.Random(seed), processor(family)
    images = [picture(rng.randint(4, 160), rng.randint(4, 160), number) for number in range(rng.randint(1, 4))]
    text = "".join(f"{rng.choice(['', 'a b', chr(10)])}{expander.placeholder}" for _ in images) + rng.choice(
        ["", "\n", " end"]
    )
    output = expander._processor(
        text=[text], images=[[image.to_pil() for image in images]], return_tensors="pt", add_special_tokens=False
    )
    pieces = iter(map(expander.expand, images))
    ids = expander._processor.tokenizer.encode(text, add_special_tokens=False)
    assert output["input_ids"][0].tolist() == [
        index for token in ids for index in (next(pieces) if token == expander.placeholder_id else [token])
    ]
    joined = expander.join([expander.features(image) for image in images])
    assert joined.keys() == output.keys() - {"input_ids", "attention_mask", "mm_token_type_ids"}
    assert all(torch.equal(joined[name], output[name]) for name in joined)


@FAMILY
def test_features_match_pads(family: str) -> None:
    expander = processor(family)
    for width, height in ((8, 8), (10, 90), (150, 20), (64, 64)):
        image = picture(width, height)
        pads = sum(token in expander.pad_ids for token in expander.expand(image))
        features = expander.features(image)
        if "image_grid_thw" in features:
            assert pads == features["image_grid_thw"].prod().item() // 4
            assert features["pixel_values"].shape[0] == features["image_grid_thw"].prod().item()
        else:
            assert pads == 16 * features["pixel_values"].shape[1]


def test_features_are_cached_up_to_a_size() -> None:
    expander = processor("qwen2.5-vl")
    limited = ImageProcessor(expander._processor, "here", cache_bytes=1)
    first, second = picture(40, 40, 1), picture(40, 40, 2)
    features = limited.features(first)
    assert limited.features(first) is features
    limited.features(second)
    assert limited.features(first) is not features
    assert torch.equal(limited.features(first)["pixel_values"], features["pixel_values"])


def test_refused_image_is_an_error_of_the_conversation() -> None:
    expander = processor("qwen2.5-vl")
    with pytest.raises(ConversationError, match="aspect ratio"):
        expander.expand(picture(900, 2))
    with pytest.raises(ConversationError, match="cannot be decoded"):
        expander.features(Image(b"\x89PNG\r\n\x1a\nnot a picture"))


def test_join_of_no_image() -> None:
    assert processor("smolvlm").join([]) == {}


def test_folder_without_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert not has_image_processor(tmp_path)
    with pytest.raises(ModelError, match="reads text only"):
        load_image_processor(tmp_path)


def test_unknown_processor_is_refused(tmp_path: Path) -> None:
    write_processor_folder(tmp_path, "qwen2.5-vl")
    assert has_image_processor(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "image_processor_type": "Unheard"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_image_processor(tmp_path)


class TwiceExpanding:
    """Writes one token more if a text has several images."""

    def __init__(self, base: ImageProcessor) -> None:
        self.base, self.tokenizer, self.chat_template = base._processor, base._processor.tokenizer, None
        self.image_token, self.image_token_id = base.placeholder, base.placeholder_id

    def __call__(self, text: list[str], **arguments: object) -> dict[str, torch.Tensor]:
        output = dict(self.base(text=text, **arguments))
        if text[0].count(self.image_token) > 1:
            output["input_ids"] = torch.cat([output["input_ids"], output["input_ids"][:, -1:]], 1)
        return output


class CuttingFeatures(TwiceExpanding):
    """Cuts the pixels of several images."""

    def __call__(self, text: list[str], **arguments: object) -> dict[str, torch.Tensor]:
        output = dict(self.base(text=text, **arguments))
        if text[0].count(self.image_token) > 1:
            output["pixel_values"] = output["pixel_values"][:-4]
        return output


def test_processor_that_differs_on_conversations_is_refused() -> None:
    with pytest.raises(ModelError, match="one by one"):
        ImageProcessor(TwiceExpanding(processor("qwen2.5-vl")), "model.path=here")
    with pytest.raises(ModelError, match=r"its pixel_values of 5 images"):
        ImageProcessor(CuttingFeatures(processor("qwen2.5-vl")), "model.path=here")


def test_placeholder_that_the_template_does_not_write(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match="writes none of"):
        load_image_processor(write_processor_folder(tmp_path, "qwen3-vl", template=template))
