"""SGLang that serves a tiny vision-language model: prompts with pictures for it, and what transformers computes of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from agentrl.config.schema import Config
from agentrl.core.images import Image, ImageSpan, PlacedImage, load_image
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess
from agentrl.models.image_processor import ImageProcessor, load_image_processor
from agentrl.runtime.episodes import open_renderer
from tests.vision_folders import write_processor_folder, write_weights

PATCHES = {"qwen2.5-vl": 14, "qwen3-vl": 16}
"""Sides of patches by family. SGLang has no SmolVLM, and refuses ids of GLM-4.5V whose text encodes to another number."""
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


def write_model(folder: Path, family: str, *, head_dim: int | None = None) -> Path:
    """Write a model whose log-probabilities depend on the pixels, and that samples no tokens of images.

    Args:
        folder: created.
        family: a name of `PATCHES`.
        head_dim: of text and pictures, in place of the tiny one, which kernels of a GPU have not.
    """
    auto: Any = AutoModelForImageTextToText
    if head_dim is None:
        write_processor_folder(folder, family, weights=0.2, patch=PATCHES[family])
    else:
        write_processor_folder(folder, family, patch=PATCHES[family])
        _widen(folder / "config.json", head_dim)
        write_weights(folder, 0.2 * (8 / head_dim) ** 0.5)
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[256:] = 0.0
    model.save_pretrained(folder)
    return folder


def _widen(file: Path, head_dim: int) -> None:
    """Set the size of heads in a ``config.json``, and what follows from it."""
    config = json.loads(file.read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= {"hidden_size": text["num_attention_heads"] * head_dim, "head_dim": head_dim}
    text["rope_parameters"]["mrope_section"] = [
        head_dim // 4 - 2 * (head_dim // 16),
        *2 * [head_dim // 8 + head_dim // 16],
    ]
    vision |= {"hidden_size": vision["num_heads"] * head_dim, "out_hidden_size": text["hidden_size"]}
    file.write_text(json.dumps(config))


@contextmanager
def serving(
    root: Path, folders: dict[str, Path], start: Callable[[Path, Path], EngineProcess]
) -> Iterator[dict[str, Server]]:
    """Start an engine for each folder, all at once: most of a start is importing what it needs.

    Args:
        root: for logs.
        folders: of the models, by family.
        start: starts an engine on a folder, with the file of its log.
    """
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(folders)) as pool:
            starts = {family: pool.submit(start, folder, root / f"{family}.log") for family, folder in folders.items()}
        for process in starts.values():
            stack.callback(process.result().stop)
        servers = {}
        for family, folder in folders.items():
            _, vocabulary = open_renderer(Config(), folder)
            servers[family] = Server(folder, starts[family].result().url, load_image_processor(folder), vocabulary)
        yield servers


def play_five_pictures(server: Server, patch: int) -> tuple[Prompt, list[tuple[int, float]]]:
    """Play four turns of a server with five pictures; the fourth picture is the first again, and none is resized.

    Returns:
        The conversation, and position and log-probability of each sampled token.
    """
    source, side = random.Random(0), 2 * patch
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
    return prompt, sampled


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
