"""Rows with images: of demonstrations, chats and recorded rollouts, into batches and through a step of the learner."""

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from safetensors.torch import load_file

from agentrl.config.load import find_config, load_config
from agentrl.config.model import RenderConfig
from agentrl.config.schema import Config
from agentrl.core.images import Image, load_image
from agentrl.core.registry import model_folder
from agentrl.core.types import Message, Provenance, Rollout, Row, StopReason, message_with_images
from agentrl.data.chats import Chat
from agentrl.obs.metrics import read_metrics
from agentrl.obs.rollouts import RolloutFile
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.base import ImageRows, SftFile, row_checksum
from agentrl.sft.batches import Packer, batches
from agentrl.sft.chats import Chats, chat_rows
from agentrl.sft.demonstrations import Demonstrations
from agentrl.sft.preflight import RendererOf, prepare_sft
from agentrl.sft.run import sft

WARM = model_folder("geometry-warm")
assert WARM is not None
SMALL = [
    f"model.path={WARM}",
    "sft.batch_size=3",
    "sft.workers=0",
    "sft.curriculum=[]",
    "learner.device=cpu",
    "obs.tensorboard=false",
]


def config(*overrides: str) -> Config:
    return load_config(find_config("geometry/sft_warm"), [*SMALL, *overrides])


@cache
def renderer() -> ChatRenderer:
    assert WARM is not None
    return RendererOf(WARM, RenderConfig())()


@cache
def picture(shade: int) -> Image:
    return load_image(Pillow.fromarray(np.full((32, 32, 3), shade, np.uint8)))


def chat(shade: int) -> Chat:
    messages = (message_with_images("user", picture(shade), "How many?"), Message("assistant", "2"))
    return Chat("chats.jsonl, line 1", messages, (), 0)


def encode(shade: int) -> ImageRows:
    return asyncio.run(chat_rows(chat(shade), renderer()))


def check_images(rows: list[Row], images: dict[str, Image]) -> None:
    """Check that rows have images, whose tokens are not trained."""
    assert all(row.images for row in rows)
    for row in rows:
        for span in row.images:
            assert images[span.digest].digest == span.digest
            assert not row.mask[span.start : span.end].any()
            assert (row.provenance[span.start : span.end] == Provenance.OBSERVED).all()


def test_demonstrations_have_the_pictures_that_the_environment_shows() -> None:
    settings = config("sft.steps=1", "sft.batch_size=2", "tasks.options.kinds=[number]", "tasks.options.faults={}")
    data = Demonstrations(settings, renderer)
    [step] = data[0]
    check_images(step.rows, dict(step.images))
    zooms = [len(row.images) - 1 for row in step.rows]
    assert max(zooms) > 0, "no expert zooms: this shows too little"
    [batch] = batches(settings, data)
    [micro] = batch.micro[0]
    assert micro.needs_vision
    by_row = [tuple(placed for placed in micro.images if micro.row_L[placed.span.start] == n) for n in range(2)]
    expected = {row.key: [span.digest for span in row.images] for row in step.rows}
    assert {key: [p.image.digest for p in placed] for key, placed in zip(micro.keys, by_row, strict=True)} == expected
    assert batch.metrics["batch/image_share"] > 0


def test_chats_have_the_pictures_of_their_messages_and_later_epochs_encode_them_again() -> None:
    encoded = encode(90)
    check_images(encoded.rows, dict(encoded.images))
    assert {*encoded.images} == {picture(90).digest}
    file = SftFile.__new__(type("File", (SftFile,), {"unit": "chats", "left_out": []}))
    file.numbers = np.arange(1)
    chats = Chats(config("sft.batch_size=1"), renderer, file, 2)

    async def encode_again(number: int) -> ImageRows:
        return await chat_rows(chat(90), renderer())

    chats._encode = encode_again  # type: ignore[method-assign]
    steps = [chats[item][0] for item in range(2)]
    assert [step.rows[0].key.rollout_id for step in steps] == ["chats.jsonl, line 1#0", "chats.jsonl, line 1#1"]
    assert all({*step.images} == {picture(90).digest} for step in steps)
    assert not chats._encoded, "the images of a file would fill the memory of each process"


def test_the_checksum_of_data_tells_pictures_of_one_size_apart() -> None:
    [bright], [dark] = encode(90).rows, encode(20).rows
    assert np.array_equal(bright.token_ids, dark.token_ids)
    assert row_checksum(bright) != row_checksum(dark)
    assert row_checksum(bright) == row_checksum(encode(90).rows[0])


@pytest.mark.parametrize("form", ["jsonl", "rollouts"])
def test_recorded_rollouts_have_the_pictures_of_the_run(tmp_path: Path, form: str) -> None:
    rollouts = []
    for number, shade in enumerate((90, 20, 90)):
        encoded = encode(shade)
        [row] = encoded.rows
        sampled = replace(
            row,
            key=replace(row.key, prompt_id="task", rollout_id=f"r{number}"),
            provenance=np.where(row.mask, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
            logprobs=-row.mask.astype(np.float32),
            versions=row.mask.astype(np.int32) - 1,
            requests=row.mask.astype(np.int32) - 1,
            request_ids=("q",),
        )
        stop = StopReason.TERMINATED
        rollouts.append(Rollout("task", sampled.key.rollout_id, [sampled], 1.0, stop, images=encoded.images))
    file = RolloutFile(tmp_path / "rollouts" / f"step_000001.{form}")
    file.write(rollouts)
    file.finish()
    overrides = ["tasks.name=null", f"sft.rollouts.path={tmp_path}", "sft.steps=null", "sft.epochs=1"]
    run = prepare_sft(config(*overrides))
    [step] = run.data[0]
    assert [row.key.rollout_id for row in sorted(step.rows, key=lambda row: row.key)] == ["r0#0", "r1#0"]
    check_images(step.rows, dict(step.images))
    micro = Packer(run.config, 0).pack(step).micro[0][0]
    assert {placed.image.data for placed in micro.images} == {picture(90).data, picture(20).data}


def test_a_step_trains_the_tower(tmp_path: Path) -> None:
    assert WARM is not None
    overrides = ["sft.steps=1", f"run.dir={tmp_path / 'run'}", "learner.optimizer.warmup_steps=0", "sft.dtype=float32"]
    out = sft(config(*overrides), note=lambda line: None)
    [metrics] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 0 < metrics["train/loss"] < 20
    before, after = (load_file(folder / "model.safetensors") for folder in (WARM, out))
    assert all((before[name].float() != after[name]).any() for name in before if name.endswith("mlp.linear_fc1.weight"))
