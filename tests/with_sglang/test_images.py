"""SGLang on a CPU with images: its expansion is the policy's, and its log-probabilities are those of transformers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.images import Image, ImageSpan, PlacedImage, load_image
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import launch_sglang
from agentrl.models.image_processor import ImageProcessor, load_image_processor
from agentrl.runtime.episodes import open_renderer
from tests.vision_folders import write_processor_folder

pytestmark = pytest.mark.sglang

TOLERANCE = 1e-4
"""As of text."""
PATCHES = {"qwen2.5-vl": 14, "qwen3-vl": 16}
"""Sides of patches by family. SGLang has no SmolVLM, and refuses ids of GLM-4.5V whose text encodes to another number."""
FAMILY = pytest.mark.parametrize("family", PATCHES)
VISION_START, VISION_END = 263, 264
"""Ids of ``<|vision_start|>`` and ``<|vision_end|>`` in both."""
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


@dataclass
class Server:
    folder: Path
    url: str
    processor: ImageProcessor
    vocabulary: Vocabulary

    def generate(self, *prompts: Prompt) -> list[Generation]:
        """Sample greedily from prompts, one after the other."""

        async def play() -> list[Generation]:
            client = SGLangClient(self.url, timeout_s=60, vocabulary=self.vocabulary)
            try:
                requests = (
                    client.generate(prompt, GREEDY, session_id="s", request_id=f"r{number}")
                    for number, prompt in enumerate(prompts)
                )
                return [await request for request in requests]
            finally:
                await client.aclose()

        return asyncio.run(play())

    def logprobs(self, prompt: Prompt) -> torch.Tensor:
        """Return log-probabilities ``[T, V]`` after each token, of transformers' own forward."""
        auto: Any = AutoModelForImageTextToText
        model = auto.from_pretrained(self.folder, dtype=torch.float32)
        row = torch.tensor([list(prompt.token_ids)])
        inputs = self.processor.join([self.processor.features(placed.image) for placed in prompt.images])
        types = (row == self.vocabulary.image_token_id).int()
        with torch.inference_mode():
            logits = model(input_ids=row, mm_token_type_ids=types, **inputs).logits[0]
        return torch.as_tensor(logits.float().log_softmax(-1))


def write_model(folder: Path, family: str) -> Path:
    """Write a model whose log-probabilities depend on the pixels, and that samples no tokens of images."""
    write_processor_folder(folder, family, weights=0.2, patch=PATCHES[family])
    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[256:] = 0.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Both at once: most of a start is importing what it needs."""
    root = tmp_path_factory.mktemp("images")
    folders = {family: write_model(root / family, family) for family in PATCHES}

    def start(family: str) -> Any:
        options = {"device": "cpu"}
        return launch_sglang(
            folders[family], log=root / f"{family}.log", options=options, python=sglang_python, timeout_s=200
        )

    with ExitStack() as stack:
        with ThreadPoolExecutor(len(PATCHES)) as pool:
            starts = {family: pool.submit(start, family) for family in PATCHES}
        for process in starts.values():
            stack.callback(process.result().stop)
        yield {
            family: Server(
                folders[family], starts[family].result().url, load_image_processor(folders[family]), vocabulary
            )
            for family in PATCHES
            for _, vocabulary in [open_renderer(Config(), folders[family])]
        }


def picture(width: int, height: int, seed: int) -> Image:
    from PIL import Image as pil

    return load_image(pil.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


def extend(prompt: Prompt, processor: ImageProcessor, images: Sequence[Image], source: random.Random) -> Prompt:
    """Return the prompt with images among bytes that are no text: what encodes their text again has other ids.

    Around an image are the tokens that the families' templates write: SGLang finds images by them.
    """
    ids, placed = list(prompt.token_ids), list(prompt.images)
    for image in images:
        ids += [*(source.randrange(2, 250) for _ in range(source.randrange(1, 6))), VISION_START]
        expansion = processor.expand(image)
        placed.append(PlacedImage(ImageSpan(len(ids), len(expansion), image.digest), image))
        ids += [*expansion, VISION_END]
    ids += [source.randrange(2, 250) for _ in range(source.randrange(1, 6))]
    return Prompt(tuple(ids), tuple(placed))


@FAMILY
def test_five_pictures_over_four_turns(servers: dict[str, Server], family: str) -> None:
    """The fourth picture is the first again; no picture is resized."""
    server, source, side = servers[family], random.Random(0), 2 * PATCHES[family]
    first = picture(3 * side, 2 * side, 1)
    turns = (
        (first, picture(2 * side, 4 * side, 2)),
        (picture(2 * side, 2 * side, 3),),
        (first, picture(4 * side, side, 4)),
        (),
    )
    prompt, sampled = Prompt(()), list[tuple[int, float]]()
    for images in turns:
        prompt = extend(prompt, server.processor, images, source)
        [generation] = server.generate(prompt)
        sampled += [(len(prompt.token_ids) + at, logprob) for at, logprob in enumerate(generation.logprobs)]
        prompt = Prompt((*prompt.token_ids, *generation.token_ids), prompt.images)
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
