"""Images in requests to engines: one token for each, pixels without loss, and the comparison of prompts."""

import io
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image as pil

from agentrl.core.errors import ConfigError
from agentrl.core.images import Image, ImageSpan, PlacedImage, load_image
from agentrl.core.types import SamplingParams
from agentrl.inference.client.generation import generate_body, read_reply
from agentrl.inference.client.request_images import check_expansion, with_images
from agentrl.inference.client.scoring import read_scores, score_body

PAD, START, END = 9, 7, 8


def picture(mode: str = "RGB", form: str = "PNG") -> Image:
    shape = (6, 5, len(mode)) if len(mode) > 1 else (6, 5)
    buffer = io.BytesIO()
    pil.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8), mode).save(buffer, form)
    return load_image(buffer.getvalue())


def placed(start: int, length: int, image: Image) -> PlacedImage:
    return PlacedImage(ImageSpan(start, length, image.digest), image)


def body(ids: list[int]) -> dict[str, Any]:
    return generate_body(ids, SamplingParams(), 4, "r:0")


def test_each_image_is_sent_as_one_token() -> None:
    """``1 <PPP> 2 <PP> P'`` with spans that include the tokens around."""
    image = picture()
    ids = [1, START, PAD, PAD, PAD, END, 2, START, PAD, PAD, END, 3]
    sent = with_images(body(ids), [placed(1, 5, image), placed(7, 4, image)], PAD, "r")
    assert sent["input_ids"] == [1, START, PAD, END, 2, START, PAD, END, 3]
    assert sent["image_data"] == [image.data_url] * 2
    assert sent["return_prompt_token_ids"] is True
    assert "image_spans" not in sent
    bare = with_images(body([1, PAD, PAD, 2]), [placed(1, 2, image)], PAD, "r")
    assert bare["input_ids"] == [1, PAD, 2]


def test_images_in_tiles_are_sent_in_full() -> None:
    ids = [1, START, PAD, PAD, START, PAD, PAD, END, 2]
    sent = with_images(body(ids), [placed(1, 7, picture())], PAD, "r")
    assert sent["input_ids"] == ids
    assert "image_spans" not in sent


def test_a_sampled_image_token_is_told_apart_by_the_places() -> None:
    ids = [1, START, PAD, PAD, END, PAD, 2]
    sent = with_images(body(ids), [placed(1, 4, picture())], PAD, "r")
    assert sent["input_ids"] == ids
    assert sent["image_spans"] == [[1, 4]]


def test_requests_of_text_are_unchanged() -> None:
    assert with_images(body([1, PAD]), [], PAD, "r") == body([1, PAD])
    with pytest.raises(
        ConfigError, match=r"request r has 1 images, and the policy.s model takes none: set model\.path"
    ):
        with_images(body([1, PAD]), [placed(1, 1, picture())], None, "r")


@pytest.mark.parametrize(
    ("mode", "form"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGB", "JPEG"), ("P", "GIF"), ("L", "PNG")]
)
def test_decoders_of_engines_read_the_same_pixels(mode: str, form: str) -> None:
    """They drop transparency, and JPEG is not read by all alike."""
    image = picture(mode, form)
    sent = with_images(body([PAD]), [placed(0, 1, image)], PAD, "r")
    received = load_image(sent["image_data"][0])
    assert received.media_type == "image/png"
    with pil.open(io.BytesIO(received.data)) as decoded:
        assert decoded.mode in ("RGB", "L")
        np.testing.assert_array_equal(np.asarray(decoded.convert("RGB")), np.asarray(image.to_pil()))


def test_png_without_transparency_is_sent_as_it_is() -> None:
    image = picture()
    assert with_images(body([PAD]), [placed(0, 1, image)], PAD, "r")["image_data"] == [image.data_url]


REPLY: dict[str, Any] = {
    "output_ids": [3],
    "prompt_token_ids": [1, PAD, PAD, 2],
    "meta_info": {
        "id": "r:0",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 3, None]],
    },
}


def test_equal_prompts() -> None:
    reply = read_reply(orjson.dumps(REPLY), body([1, PAD, PAD, 2]), "r", has_images=True)
    assert reply.generation.token_ids == (3,)
    older = {name: value for name, value in REPLY.items() if name != "prompt_token_ids"}
    read_reply(orjson.dumps(older), body([1, PAD, PAD, 2]), "r", has_images=True)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, PAD, PAD, PAD, 2], r"request r to a prompt of 4 tokens, agentrl to 5, and they differ from token 3 on"),
        (
            [1, PAD, PAD, 5],
            r"a prompt of 4 tokens, agentrl to 4, and they differ from token 3 on.*start the engine with",
        ),
    ],
)
def test_another_expansion_stops_the_run(ids: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_reply(orjson.dumps(REPLY), body(ids), "r", has_images=True)


def test_another_length_of_an_engine_that_returns_no_ids() -> None:
    with pytest.raises(ConfigError, match=r"a prompt of 900 tokens, agentrl to 4\. Both must"):
        check_expansion([1, PAD, PAD, 2], None, 900, "r")
    check_expansion([1], None, None, "r")


def test_scores_of_a_prompt_with_an_image() -> None:
    """SGLang writes 0 in place of the ids of image tokens."""
    ids = [1, PAD, PAD, 2, 3]
    meta = {
        "id": "s", "finish_reason": {"type": "length"}, "prompt_tokens": 5, "completion_tokens": 0,
        "input_token_logprobs": [[None, 1, None], [-9.0, 0, None], [-9.0, 0, None], [-1.0, 2, None], [-2.0, 3, None]],
    }  # fmt: skip
    reply = {"meta_info": meta, "prompt_token_ids": ids}
    assert read_scores(orjson.dumps(reply), score_body(ids, 1, "s"), 50, PAD)[-2:] == (-1.0, -2.0)
    with pytest.raises(ConfigError, match="agentrl to 5, and they differ from token 1 on"):
        read_scores(orjson.dumps({**reply, "prompt_token_ids": [1, 4, PAD, 2, 3]}), score_body(ids, 1, "s"), 50, PAD)
