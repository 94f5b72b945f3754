"""``agentrl bench images``: time and memory of episodes with images, and of episodes of text with as many tokens.

Each measurement has a process of its own, whose most resident memory is the measure.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.images import Image, ImageSpan, PlacedImage, load_image
from agentrl.core.types import FinishReason, Generation, Row
from agentrl.episode.trajectory import Trajectory
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.request import GenerateInput, SamplingOptions
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.load import load_tokenizer

_TURNS = 4
_SAMPLED = 8
"""Tokens that a turn samples."""
_TEXT = 6
"""Tokens of text before each picture, and before each turn of the policy."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class ImageBench:
    """Options of the benchmark; see the command."""

    model: Path
    """Folder of a vision-language model."""
    episodes: int
    pictures: int
    """Of an episode, spread over its turns."""
    side_px: int
    threads: int


@dataclass(slots=True)
class Cost:
    """What one process has used."""

    seconds: float
    mib: float
    """Its most resident memory, less that before its episodes or its steps."""
    tokens: int
    """Of all episodes, prompts included."""
    rows: list[Row] = field(default_factory=list)
    images: dict[str, Image] = field(default_factory=dict)


def measure_images(bench: ImageBench) -> Iterator[tuple[str, Cost, Cost]]:
    """Yield what is measured, its cost with images, and that of text: of the engine, then of two steps of the learner.

    Raises:
        ConfigError: the model reads no images.
    """
    with_images, text = (_run_alone(sample_episodes, bench, kind) for kind in (True, False))
    yield "engine", with_images, text
    with_images, text = (_run_alone(train_rows, bench, cost.rows, cost.images) for cost in (with_images, text))
    yield "learner", with_images, text


def _run_alone(function: Callable[..., Cost], *arguments: object) -> Cost:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def sample_episodes(bench: ImageBench, with_images: bool) -> Cost:
    """Sample all episodes at the same time from an engine in this process."""
    torch.set_num_threads(bench.threads)
    model = Model(bench.model, torch.float32, bench.episodes, _context(bench))
    if model.images is None:
        raise ConfigError(f"--model={bench.model} reads no images")
    scheduler = Scheduler(model, StopMatcher(load_tokenizer(bench.model), model.vocabulary), 5, 0, "0")
    episodes = [_Episode(bench, model, number, with_images) for number in range(bench.episodes)]
    before_mib = _resident_mib()

    async def run() -> None:
        loop = asyncio.create_task(scheduler.run())
        try:
            await asyncio.gather(*(episode.play(scheduler) for episode in episodes))
        finally:
            loop.cancel()

    start = time.perf_counter()
    asyncio.run(run())
    seconds = time.perf_counter() - start
    rows = [row for episode in episodes for row in episode.trajectory.rows("task", f"episode-{episode.number}")]
    images = {digest: image for episode in episodes for digest, image in episode.trajectory.images.items()}
    return Cost(seconds, _peak_mib() - before_mib, sum(len(row.token_ids) for row in rows), rows, images)


class _Episode:
    """Pictures with text between over several turns, or as many tokens of text."""

    def __init__(self, bench: ImageBench, model: Model, number: int, with_images: bool) -> None:
        self.number = number
        self.trajectory = Trajectory()
        self._bench, self._model, self._with_images = bench, model, with_images
        self._random = random.Random(number)
        self._ids: list[int] = []
        self._placed: list[PlacedImage] = []

    async def play(self, scheduler: Scheduler) -> None:
        for turn in range(_TURNS):
            first, last = (self._bench.pictures * at // _TURNS for at in (turn, turn + 1))
            for picture in range(first, last):
                self._ids += self._text(_TEXT)
                self._add_picture(picture)
            self._ids += self._text(_TEXT)
            self.trajectory.extend_to(self._ids, images=self._placed)
            options = SamplingOptions(max_new_tokens=_SAMPLED, temperature=1.0, ignore_eos=True)
            images = tuple(placed.image for placed in self._placed)
            spans = tuple((placed.span.start, placed.span.length) for placed in self._placed)
            name = f"{self.number}-{turn}"
            request = scheduler.submit(
                GenerateInput([*self._ids], options, name, logprobs=True, images=images, image_spans=spans)
            )
            await request.done
            reply = scheduler.reply(request)
            sampled = tuple(int(token) for token in reply["output_ids"])
            logprobs = tuple(float(entry[0]) for entry in reply["meta_info"]["output_token_logprobs"])
            self.trajectory.append_sampled(Generation(sampled, logprobs, FinishReason.LENGTH, ((0, 0),), 0, name))
            self._ids += sampled

    def _text(self, count: int) -> list[int]:
        return [self._random.randrange(10, 60) for _ in range(count)]

    def _add_picture(self, number: int) -> None:
        encoder = self._model.images
        assert encoder is not None
        image = _picture(self._bench.side_px, self.number * self._bench.pictures + number)
        expansion = encoder.processor.expand(image)
        if self._with_images:
            self._placed.append(PlacedImage(ImageSpan(len(self._ids), len(expansion), image.digest), image))
            self._ids += expansion
        else:
            self._ids += self._text(len(expansion))


def train_rows(bench: ImageBench, rows: Sequence[Row], images: dict[str, Image]) -> Cost:
    """Take two optimizer steps on the rows; the second is the measure of time."""
    config = Config()
    learner_config = config.learner.model_copy(update={"device": "cpu", "threads": bench.threads})
    learner = LocalLearnerGroup(bench.model, learner_config, config.algo, seed=0)
    advantages = {
        row.key: np.where(row.mask, (-1.0) ** number, 0).astype(np.float32) for number, row in enumerate(rows)
    }
    batch = pack(rows, PackOptions(tokens_per_micro=4096), RowSignals(advantages=advantages, images=images))
    before_mib = _resident_mib()
    learner.train_step(batch)
    start = time.perf_counter()
    learner.train_step(batch)
    seconds = time.perf_counter() - start
    learner.close()
    return Cost(seconds, _peak_mib() - before_mib, sum(len(row.token_ids) for row in rows))


def _picture(side_px: int, seed: int) -> Image:
    from PIL import Image as pil

    pixels = np.random.default_rng(seed).integers(0, 256, (side_px, side_px, 3), np.uint8)
    return load_image(pil.fromarray(pixels))


def _context(bench: ImageBench) -> int:
    """Return tokens that an episode has at most, for pictures of up to 64 tokens."""
    return bench.pictures * (64 + _TEXT) + _TURNS * (_TEXT + _SAMPLED)


def _resident_mib() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss) / _MIB


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
