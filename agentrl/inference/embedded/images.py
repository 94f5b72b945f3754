"""Images of prompts: the tokens that stand for them, their rotary positions, and their features, computed once an image."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.core.errors import ConversationError
from agentrl.core.images import Image, ImageSpan
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.models.image_features import compute_image_features
from agentrl.models.image_positions import Grid, ImagePositions
from agentrl.models.image_processor import probe_image

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE_BYTES = 256 << 20
"""Largest size of cached features; the least recently used images are dropped first."""
INPUT_CACHE_BYTES = 64 << 20
"""Largest size of cached inputs of the vision tower. New weights drop them: small tensors that stay for many updates lie
between the large ones of each, so that the process grows by several times their size."""
_MOST_KEYS = 1 << 16
"""Images whose keys and grids are remembered: an image that returns later has another key, and is computed again."""


class Processor(Protocol):
    """What the engine needs of `agentrl.models.image_processor.ImageProcessor`."""

    def expand(self, image: Image) -> tuple[int, ...]:
        """Return the ids that stand for an image."""
        ...

    def features(self, image: Image) -> dict[str, Tensor]:
        """Return what the vision tower reads of an image."""
        ...

    def clear(self) -> None:
        """Drop what is cached of images."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image of a prompt."""

    image: Image
    tokens: NDArray[np.int64]
    """``[n]`` indices in the prompt of the tokens at which its features stand, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt of ``P`` tokens."""

    images: tuple[PromptImage, ...]
    prompt_rotary: NDArray[np.int64]
    """``[axes, P]`` rotary positions of the prompt."""
    prompt_keys: NDArray[np.int32]
    """``[P]`` ids of the prompt; in place of the tokens of an image's features a negative number that no other image has."""

    def rotary(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the rotary positions ``[axes, end - start]`` of tokens of prompt and output."""
        axes, count = self.prompt_rotary.shape
        positions = np.tile(np.arange(start, end) + ImagePositions.offset(self.prompt_rotary), (axes, 1))
        positions[:, : max(0, count - start)] = self.prompt_rotary[:, start:end]
        return positions

    def keys(self, output: Sequence[int]) -> NDArray[np.int32]:
        """Return the keys of prompt and output in the prefix cache."""
        return np.concatenate([self.prompt_keys, np.asarray(output, np.int32)])

    def segment_images(self, start: int, end: int) -> tuple[SegmentImage, ...]:
        """Return what tokens of prompt and output have of each image."""
        bounds = [np.searchsorted(placed.tokens, (start, end)).tolist() for placed in self.images]
        return tuple(
            SegmentImage(placed.image, first, placed.tokens[first:last] - start)
            for placed, (first, last) in zip(self.images, bounds, strict=True)
            if first < last
        )


@dataclass(frozen=True, slots=True, eq=False)
class SegmentImage:
    """An image whose features, or some of them, stand among the new tokens of a request."""

    image: Image
    first: int
    """The first of these features; those before it are in the prefix cache."""
    rows: NDArray[np.int64]
    """Indices of the tokens among the new ones."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """What the vision tower returns of an image."""

    embeddings: Tensor
    """``[n, H]``, which take the place of the embeddings of its tokens."""
    deep: tuple[Tensor, ...]
    """``[n, H]`` of each of the first layers after which features are added (DeepStack, https://arxiv.org/abs/2406.04334)."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.embeddings, *self.deep))


class ImageEncoder:
    """Places images in prompts and computes their features.

    Args:
        model: a vision-language model of transformers.
        positions: how it numbers the tokens of images.
        processor: of its folder.
    """

    def __init__(self, model: PreTrainedModel, positions: ImagePositions, processor: Processor) -> None:
        self.positions = positions
        self.processor = processor
        self._model: Any = model
        self._features: OrderedDict[tuple[int, str], ImageFeatures] = OrderedDict()
        self._cached_bytes = 0
        self._keys: OrderedDict[str, int] = OrderedDict()
        self._grids: OrderedDict[str, Grid] = OrderedDict()
        self._numbers = itertools.count(1)
        self.computed = 0
        """Images that went through the vision tower."""

    def place(
        self, token_ids: Sequence[int], images: Sequence[Image], spans: Sequence[Sequence[int]] | None = None
    ) -> tuple[list[int], PromptImages]:
        """Return the ids of a prompt with the tokens of its images in full, and its images.

        Args:
            token_ids: with the tokens of the images in full, or, as SGLang takes them, with one in place of each image's.
            images: in the order of their tokens.
            spans: first token and number of tokens of each image; None: every image token belongs to an image.

        Raises:
            BadRequestError: the tokens do not fit the images, or an image cannot be processed.
        """
        token = self.positions.image_token_id
        try:
            expansions = [self.processor.expand(image) for image in images]
            grids = [self._grid(image) for image in images] if self.positions.axes > 1 else []
        except ConversationError as error:
            raise BadRequestError(f"image_data: {error}") from error
        counts = [expansion.count(token) for expansion in expansions]
        if spans is None:
            token_ids, placed = self._find(list(token_ids), expansions, counts)
        else:
            placed = [
                np.array([index for index in range(start, start + length) if token_ids[index] == token], np.int64)
                for start, length in spans
                if 0 <= start <= start + length <= len(token_ids)
            ]
            if [len(tokens) for tokens in placed] != counts:
                raise BadRequestError(
                    f"image_spans={list(spans)} have {[len(tokens) for tokens in placed]} tokens {token}; the {len(images)} "
                    f"images have {counts}"
                )
        keys = np.array(token_ids, np.int32)
        for image, tokens in zip(images, placed, strict=True):
            keys[tokens] = -self._key(image.digest)
        ends = [(int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else (0, 0) for tokens in placed]
        image_spans = [
            ImageSpan(start, end - start, image.digest) for image, (start, end) in zip(images, ends, strict=True)
        ]
        rotary = self.positions.rotary(token_ids, image_spans, grids)
        placed_images = [PromptImage(image, tokens) for image, tokens in zip(images, placed, strict=True)]
        return list(token_ids), PromptImages(tuple(placed_images), rotary, keys)

    def _find(
        self, token_ids: list[int], expansions: Sequence[tuple[int, ...]], counts: Sequence[int]
    ) -> tuple[list[int], list[NDArray[np.int64]]]:
        """Return the ids with the tokens of all images in full, and the tokens of each image's features."""
        token, total = self.positions.image_token_id, sum(counts)
        number = token_ids.count(token)
        if number == len(expansions) != total:
            remaining = iter(expansions)
            token_ids = [index for sent in token_ids for index in (next(remaining) if sent == token else (sent,))]
        elif number != total:
            raise BadRequestError(
                f"input_ids have {number} image tokens ({token}); the {len(expansions)} images of image_data have {total} in "
                f"full, or one each: are they expanded by another processor, or twice?"
            )
        indices = np.flatnonzero(np.array(token_ids) == token)
        return token_ids, np.split(indices, np.cumsum(counts)[:-1])

    def _grid(self, image: Image) -> Grid:
        if image.digest not in self._grids:
            time, height, width = self.processor.features(image)["image_grid_thw"].view(-1).tolist()
            self._grids[image.digest] = int(time), int(height), int(width)
            if len(self._grids) > _MOST_KEYS:
                self._grids.popitem(last=False)
        return self._grids[image.digest]

    def _key(self, digest: str) -> int:
        if digest not in self._keys:
            self._keys[digest] = next(self._numbers)
            if len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)
        return self._keys[digest]

    def features(self, image: Image, adapter: int = 0) -> ImageFeatures:
        """Return the features of an image, computed with the weights of an adapter by its number, which are in place."""
        key = (adapter, image.digest)
        if key in self._features:
            self._features.move_to_end(key)
            return self._features[key]
        features = self._features[key] = self._compute(image)
        self._cached_bytes += features.size
        while self._cached_bytes > _CACHE_BYTES and len(self._features) > 1:
            self._cached_bytes -= self._features.popitem(last=False)[1].size
        return features

    def _compute(self, image: Image) -> ImageFeatures:
        self.computed += 1
        with torch.inference_mode():
            embeddings, *deep = compute_image_features(self._model, self.processor.features(image))
        return ImageFeatures(embeddings.to(self._model.dtype), tuple(layer.to(self._model.dtype) for layer in deep))

    def check_prompt(self, ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], PromptImages, dict[str, Tensor]]:
        """Return a prompt with an image between these ids, and the other inputs with which transformers computes it itself."""
        token = self.positions.image_token_id
        text = [(index + (index == token)) % max(token, 1) if index >= token else index for index in ids.tolist()]
        image = probe_image(60, 44)
        expansion = self.processor.expand(image)
        half = len(text) // 2
        token_ids, prompt = self.place([*text[:half], *expansion, *text[half:]], [image])
        inputs = dict(self.processor.features(image))
        if self.positions.axes > 1:
            inputs["mm_token_type_ids"] = (torch.tensor(token_ids) == token).int()[None]
        return np.array(token_ids, np.int32), prompt, inputs

    def clear(self) -> None:
        """Drop all features: the weights change."""
        self.processor.clear()
        self._features.clear()
        self._cached_bytes = 0
