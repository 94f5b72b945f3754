"""Rotary positions of rows with images beside those of transformers' own ``get_rope_index``."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from agentrl.core.errors import ModelError
from agentrl.core.images import ImageSpan
from agentrl.models.image_positions import Grid, ImagePositions, image_positions
from tests.unit.models.vision_folders import FAMILIES, IMAGE_TOKEN, vision_config

START, END = 502, 503


def row(rng, grids, merge=2):
    """Token ids of texts and images, with the spans of the images: ``START``, the features and ``END``."""
    tokens = list(map(int, rng.integers(0, 400, rng.integers(0, 9))))
    spans = []
    for number, grid in enumerate(grids):
        count = int(np.prod(grid)) // merge**2
        spans.append(ImageSpan(len(tokens), count + 2, f"{number:064x}"))
        tokens += [START, *[IMAGE_TOKEN] * count, END, *map(int, rng.integers(0, 400, rng.integers(0, 9)))]
    return tokens, spans


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "smolvlm"])
def test_positions_are_the_familys_own(family):
    config = vision_config(family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    positions = image_positions(config.to_dict(), "tiny")
    assert positions is not None
    assert positions.axes == 3
    rng = np.random.default_rng(0)
    for _ in range(40):
        grids: list[Grid] = [(1, *map(int, 2 * rng.integers(1, 7, 2))) for _ in range(rng.integers(1, 5))]
        tokens, spans = row(rng, grids)
        ids = torch.tensor([tokens])
        expected, delta = model.get_rope_index(ids, (ids == IMAGE_TOKEN).int(), image_grid_thw=torch.tensor(grids))
        computed = positions.rotary(tokens, spans, grids)
        np.testing.assert_array_equal(computed, expected[:, 0].numpy())
        assert ImagePositions.offset(computed) == int(delta)


def test_a_sampled_image_token_is_text():
    positions = ImagePositions(IMAGE_TOKEN, 3, 2)
    tokens, spans = [5, START, *[IMAGE_TOKEN] * 4, END, IMAGE_TOKEN, 6], [ImageSpan(1, 6, "a" * 64)]
    computed = positions.rotary(tokens, spans, [(1, 4, 4)])
    assert computed[0].tolist() == [0, 1, 2, 2, 2, 2, 4, 5, 6]
    assert computed[1].tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 6]
    assert computed[2].tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert ImagePositions.offset(computed) == -2
    assert positions.feature_tokens(tokens, spans[0]).tolist() == [2, 3, 4, 5]


def test_text_alone_is_numbered():
    positions = ImagePositions(IMAGE_TOKEN, 3, 2)
    computed = positions.rotary([1, 2, 3], [], [])
    assert computed.tolist() == [[0, 1, 2]] * 3
    assert ImagePositions.offset(computed) == 0
    assert ImagePositions.offset(positions.rotary([], [], [])) == 0


def test_other_families_have_one_axis():
    positions = image_positions(vision_config("smolvlm").to_dict(), "tiny")
    assert positions == ImagePositions(IMAGE_TOKEN, 1)
    tokens = [1, *[IMAGE_TOKEN] * 4, 2]
    assert positions.rotary(tokens, [ImageSpan(1, 4, "a" * 64)], []).tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("count", [3, 8])
def test_an_image_with_other_tokens_than_its_grid(count):
    tokens = [1, *[IMAGE_TOKEN] * count, 2]
    with pytest.raises(
        ValueError, match=rf"has {count} tokens 500 at 1 to {1 + count}, but its grid \(1, 4, 4\) has 4"
    ):
        ImagePositions(IMAGE_TOKEN, 3, 2).rotary(tokens, [ImageSpan(1, count, "a" * 64)], [(1, 4, 4)])


def test_what_is_refused():
    assert image_positions({"model_type": "qwen3"}, "tiny") is None
    with pytest.raises(ModelError, match="image_token_id=None is not a token id"):
        image_positions({"model_type": "x", "vision_config": {}}, "model.path=x")
    scaling = {"rope_parameters": {"mrope_section": [1, 1, 1]}}
    unknown = {"model_type": "new_vl", "vision_config": {}, "image_token_id": 1, "text_config": scaling}
    with pytest.raises(ModelError, match="model_type='new_vl', whose rotary positions"):
        image_positions(unknown, "model.path=x")
