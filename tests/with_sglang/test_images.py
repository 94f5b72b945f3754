"""SGLang on a CPU with images: its expansion is the policy's, and its log-probabilities are those of transformers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.batch.groups import group_rollouts
from agentrl.batch.packing import PackOptions
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.core.images import PlacedImage
from agentrl.core.types import MaskReason, Prompt, Provenance, Rollout, Row, RowKey, StopReason, message_with_images
from agentrl.inference.launch.processes import EngineProcess, launch_sglang
from agentrl.models.image_processor import load_image_processor
from agentrl.runtime.episodes import open_renderer
from agentrl.testing import FakeLearner
from agentrl.train.teachers import Scores, open_teachers
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


def rollout_of(prompt: Prompt, sampled: Sequence[int], **fields: Any) -> Rollout:
    """Return a rollout of one row, whose tokens at these positions were sampled."""
    mask = np.zeros(len(prompt.token_ids), np.uint8)
    mask[list(sampled)] = 1
    row = Row(
        key=RowKey("p", "r"),
        token_ids=np.array(prompt.token_ids, np.int32),
        provenance=np.where(mask, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=mask,
        mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.zeros(len(mask), np.float32),
        versions=mask.astype(np.int32) - 1,
        requests=mask.astype(np.int32) - 1,
        request_ids=("q",),
        images=tuple(placed.span for placed in prompt.images),
    )
    images = {placed.span.digest: placed.image for placed in prompt.images}
    return Rollout("p", "r", [row], 0.0, StopReason.TERMINATED, images=images, **fields)


@FAMILY
def test_a_teacher_scores_rows_with_pictures_as_transformers_does(
    servers: dict[str, Server], family: str, tmp_path: Path
) -> None:
    """One teacher reads the rows, another one a prompt with a hint. The second time SGLang has prefixes in its cache."""
    server = servers[family]
    prompt, sampled = play_five_pictures(server, PATCHES[family])
    positions = [at for at, _ in sampled]
    message = message_with_images("user", prompt.images[0].image, "How many?")
    rollout = rollout_of(prompt, positions, messages=(message,))
    changes = [f"algo.distillation.teachers.{name}.url={server.url}" for name in ("plain", "hinted")]
    changes += ["algo.distillation.teachers.hinted.context=Seven? {message}", "rollout.max_tokens=2000"]
    config = load_config(None, [*changes, "algo.distillation.reward_coef=0"])

    async def score() -> list[dict[str, Scores]]:
        async with AsyncExitStack() as exits:
            teachers = await open_teachers(config, server.folder, tmp_path, exits)
            assert teachers is not None
            return [await teachers.score(group_rollouts([rollout]), FakeLearner(), PackOptions(4096)) for _ in range(2)]

    renderer, _ = open_renderer(config, server.folder)
    other_prompt = renderer.render((replace(message, content=f"Seven? {message.content}"),))
    shift = len(other_prompt.token_ids) - positions[0]
    placed = [*other_prompt.images]
    placed += [
        PlacedImage(replace(image.span, start=image.span.start + shift), image.image)
        for image in prompt.images
        if image.span.start > positions[0]
    ]
    hinted = Prompt((*other_prompt.token_ids, *prompt.token_ids[positions[0] :]), tuple(placed))
    cases = {"plain": (prompt, 0), "hinted": (hinted, shift)}
    logprobs = {name: server.logprobs(case_prompt) for name, (case_prompt, _) in cases.items()}
    for scores in asyncio.run(score()):
        for name, (_, offset) in cases.items():
            expected = [float(logprobs[name][at + offset - 1, prompt.token_ids[at]]) for at in positions]
            np.testing.assert_allclose(scores[name][RowKey("p", "r")][positions], expected, atol=TOLERANCE)


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
