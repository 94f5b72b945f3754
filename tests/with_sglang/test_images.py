"""SGLang on a CPU with images: its expansion is the policy's, and its log-probabilities are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.images import PlacedImage
from agentrl.core.types import Prompt
from agentrl.inference.launch.processes import EngineProcess, launch_sglang
from agentrl.models.image_processor import load_image_processor
from tests.sglang_images import (
    GREEDY,
    PATCHES,
    Server,
    extend,
    picture,
    play_five_pictures,
    serving,
    write_model,
)
from tests.vision_folders import write_processor_folder

pytestmark = pytest.mark.sglang

TOLERANCE = 1e-4
"""As of text."""
FAMILY = pytest.mark.parametrize("family", PATCHES)


@pytest.fixture(scope="module")
def servers(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    root = tmp_path_factory.mktemp("images")
    folders = {family: write_model(root / family, family) for family in PATCHES}

    def start(folder: Path, log: Path) -> EngineProcess:
        return launch_sglang(folder, log=log, options={"device": "cpu"}, python=sglang_python, timeout_s=200)

    with serving(root, folders, start) as started:
        yield started


@FAMILY
def test_five_pictures_over_four_turns(servers: dict[str, Server], family: str) -> None:
    server, side = servers[family], 2 * PATCHES[family]
    prompt, sampled = play_five_pictures(server, PATCHES[family])
    assert len(prompt.images) == 5
    logprobs = server.logprobs(prompt)
    expected = [float(logprobs[at - 1, prompt.token_ids[at]]) for at, _ in sampled]
    np.testing.assert_allclose([logprob for _, logprob in sampled], expected, atol=TOLERANCE)
    assert all(int(logprobs[at - 1].argmax()) == prompt.token_ids[at] for at, _ in sampled)
    other = picture(3 * side, 2 * side, 9)
    span = prompt.images[0].span
    changed = Prompt(prompt.token_ids, (PlacedImage(span, other), *prompt.images[1:]))
    assert (server.logprobs(changed) - logprobs)[-1].abs().max() > 100 * TOLERANCE, "pixels count"


@FAMILY
def test_expansions_are_equal(servers: dict[str, Server], family: str) -> None:
    """The prompt of the check at each engine's start, and pictures of many sizes and sides; `generate` compares all ids."""
    server, source = servers[family], random.Random(1)
    assert server.vocabulary.image_prompt is not None
    sizes = [(source.randrange(20, 260), source.randrange(20, 260)) for _ in range(10)]
    images = [picture(*size, seed) for seed, size in enumerate(sizes)]
    prompt = extend(Prompt(()), server.processor, images, source)
    generations = server.generate(server.vocabulary.image_prompt, prompt)
    assert [len(generation.token_ids) for generation in generations] == 2 * [GREEDY.max_new_tokens]


@FAMILY
def test_another_expansion_stops_the_run(servers: dict[str, Server], family: str, tmp_path: Path) -> None:
    """The policy's processor allows images of fewer pixels than the engine's."""
    server = servers[family]
    folder = write_processor_folder(tmp_path / "model", family, patch=PATCHES[family])
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text())
    config["size"]["longest_edge"] //= 2
    file.write_text(json.dumps(config))
    side = 2 * PATCHES[family]
    prompt = extend(Prompt(()), load_image_processor(folder), [picture(5 * side, 4 * side, 1)], random.Random(2))
    with pytest.raises(ConfigError, match=r"the engine expands the images of request r0 to a prompt of \d+ tokens"):
        server.generate(prompt)
