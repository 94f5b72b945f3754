"""Rows with pictures for tiny vision-language models of random weights, and their log-probabilities by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.images import Image, ImageSpan, load_image
from agentrl.core.types import MaskReason, Provenance, Row, RowKey
from agentrl.models.image_processor import ImageProcessor, load_image_processor
from tests.batches import pack_rows
from tests.unit.learner.megatron.models import make_critic_model
from tests.vision_folders import FAMILIES, write_processor_folder

TOWERS = dict.fromkeys(FAMILIES, "*.visual.*") | {"smolvlm": "*.vision_model.*"}
"""Patterns of ``learner.freeze``."""


@cache
def folder(family: str) -> Path:
    """Return a tiny model whose weights are large enough that images change the log-probabilities of text."""
    return write_processor_folder(Path(mkdtemp()) / family, family, weights=0.1)


@cache
def critic_folder(family: str) -> Path:
    """Return the model of `folder` with a random value head."""
    return make_critic_model(folder(family), shutil.copytree(folder(family), Path(mkdtemp()) / family))


def own_model(path: Path) -> Any:
    auto: Any = AutoModelForImageTextToText
    return auto.from_pretrained(path, dtype=torch.float32).eval()


@cache
def processor(family: str) -> ImageProcessor:
    return load_image_processor(folder(family))


@cache
def picture(number: int) -> Image:
    """Return a picture of few pixels, of a size that differs among numbers."""
    pixels = np.random.default_rng(number).integers(0, 256, (16 + 8 * (number % 3), 24 + 8 * (number % 2), 3), np.uint8)
    return load_image(Pillow.fromarray(pixels))


def row(family: str, name: str, parts: Sequence[str | int | tuple[int, ...]], seed: int = 0) -> Row:
    """Return a row of texts, numbers of pictures, and sampled ids."""
    ids: list[int] = []
    sampled: list[bool] = []
    spans = []
    tokenizer = processor(family)._processor.tokenizer
    for part in parts:
        if isinstance(part, str):
            new: Sequence[int] = tokenizer.encode(part, add_special_tokens=False)
        elif isinstance(part, int):
            new = processor(family).expand(picture(part))
            spans.append(ImageSpan(len(ids), len(new), picture(part).digest))
        else:
            new = part
        ids += new
        sampled += [isinstance(part, tuple)] * len(new)
    mask = np.array(sampled)
    rng = np.random.default_rng(seed)
    return Row(
        key=RowKey("p", name),
        token_ids=np.array(ids, np.int32),
        provenance=np.where(mask, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=mask.astype(np.uint8),
        mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=(-rng.uniform(3, 6, len(ids)) * mask).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        requests=np.where(mask, 0, -1).astype(np.int32),
        request_ids=("q",),
        images=tuple(spans),
    )


def episodes(family: str) -> list[Row]:
    """Return five pictures over four turns, the same with another third picture, a fork, and rows with one and without."""
    pad = next(iter(processor(family).pad_ids))  # a policy may sample it: then it is a token like others
    first, second, third = (40, 41, 42, 43), (44, pad, 45), (46, 47)
    begin = ["count ", 0, " and ", 1, ":", first, "next ", 2, second]
    return [
        row(family, "a", [*begin, "then ", 3, ",", 4, third, "end", (50, 51)]),
        row(
            family,
            "b",
            ["count ", 0, " and ", 3, ":", first, "next ", 2, second, "then ", 3, ",", 4, third, "end", (50, 52)],
        ),
        row(family, "c", [*begin, "other", (60, 61, 62)]),
        row(family, "d", [1, "what", (70, 71)]),
        row(family, "e", ["no picture", (72, 73)]),
    ]


IMAGES = {picture(number).digest: picture(number) for number in (*range(5), 7)}
"""The last has the size of the second."""


def batch(rows: list[Row], *, tokens: int = 4096, share_prefixes: bool = False, ranks: int = 1) -> GlobalBatch:
    advantages = {made.key.rollout_id: (-1) ** number * (1 + number) for number, made in enumerate(rows)}
    options = {"tokens_per_micro": tokens, "share_prefixes": share_prefixes, "data_parallel_size": ranks}
    return pack_rows(rows, advantages, pad_id=0, images=IMAGES, **options)


def own_logprobs(family: str, rows: list[Row]) -> dict[RowKey, np.ndarray]:
    """Return log-probabilities ``[T]`` of each row by transformers, 0 for its first token."""
    model, logprobs = own_model(folder(family)), {}
    for made in rows:
        inputs = own_inputs(family, made)
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        scores = logits[:-1].log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        logprobs[made.key] = np.concatenate([[0], scores.numpy()])
    return logprobs


def own_values(
    family: str, rows: list[Row], weight_1_H: torch.Tensor, bias_1: torch.Tensor
) -> dict[RowKey, np.ndarray]:
    """Return values ``[T]`` of the states before each row's tokens by transformers and a head, 0 for its first token."""
    model, values = own_model(folder(family)).model, {}
    for made in rows:
        with torch.no_grad():
            hidden_T_H = model(**own_inputs(family, made)).last_hidden_state[0]
        values[made.key] = np.concatenate([[0], (hidden_T_H @ weight_1_H[0] + bias_1)[:-1].numpy()])
    return values


def own_inputs(family: str, made: Row) -> dict[str, torch.Tensor]:
    """Return the arguments of a model of transformers for a row."""
    ids = torch.from_numpy(made.token_ids.astype(np.int64))[None]
    inputs = processor(family).join([processor(family).features(IMAGES[span.digest]) for span in made.images])
    if made.images and "image_grid_thw" in inputs:
        kinds = torch.zeros_like(ids)
        for span in made.images:
            place = slice(span.start, span.end)
            kinds[0, place] = torch.isin(ids[0, place], torch.tensor([*processor(family).pad_ids])).long()
        inputs |= {"mm_token_type_ids": kinds}
    return {"input_ids": ids, **inputs}


def without_sampled_pads(family: str, rows: list[Row]) -> list[Row]:
    """Replace sampled pads, which transformers itself cannot tell from those of images."""
    pads = np.array([*processor(family).pad_ids])
    return [
        replace(made, token_ids=np.where((made.mask != 0) & np.isin(made.token_ids, pads), 44, made.token_ids))
        for made in rows
    ]
