"""Images in learners: features of a micro-batch's images, the tokens that they replace, and rotary positions.

The features are computed by the model's vision tower, once for an image however many rows have it, and replace the embeddings
of the image's tokens. Only these tokens take features: one that the policy sampled has its own embedding, whatever its id.

Legend: ``L`` tokens of a micro-batch, ``M`` of its tokens that take features, ``F`` features of its images, ``H`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedModel

from agentrl.batch.microbatch import MicroBatch, to_device
from agentrl.core.errors import LearnerError
from agentrl.core.images import ImageSpan
from agentrl.learner.layers import vision_tower
from agentrl.models.image_features import compute_image_features
from agentrl.models.image_positions import Grid, ImagePositions, read_image_positions
from agentrl.models.image_processor import Features, ImageProcessor, load_image_processor

_GRID = "image_grid_thw"
"""Input of vision towers that take images of any size."""
_CACHE_BYTES = 512 << 20
"""Features that a rank keeps: passes of a training step over the same images do not compute them again."""
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The inputs of the vision tower for a micro-batch, and where its outputs go."""

    features: Features
    """Inputs of the tower, on the CPU: of each image once, or of an image of zeros if the micro-batch has none."""
    places_M: NDArray[np.int64]
    """Tokens that take features, ascending."""
    lines_M: NDArray[np.int64]
    """The feature of each."""
    count: int
    """``F``; 0 of an image of zeros."""

    def at(self, places_M: NDArray[np.int64]) -> ImageTokens:
        """Return the same features at other places, of which several may be one: these have the same feature."""
        unique, first = np.unique(places_M, return_index=True)
        return replace(self, places_M=unique, lines_M=self.lines_M[first])

    def slice(self, tokens: slice) -> ImageTokens:
        """Return those of a part of the tokens, with places counted from its start."""
        inside_M = (self.places_M >= tokens.start) & (self.places_M < tokens.stop)
        return replace(self, places_M=self.places_M[inside_M] - tokens.start, lines_M=self.lines_M[inside_M])


class ImageInputs:
    """What a vision-language model needs for its images, besides token ids.

    Args:
        hf: a model of transformers with a vision tower; of its text part nothing is used.
        folder: of the model, with its image processor.
        positions: how it numbers tokens.
        key: configuration key of the folder, for messages.
    """

    def __init__(self, hf: PreTrainedModel, folder: Path, positions: ImagePositions, key: str) -> None:
        self._hf: Any = hf
        self._folder = folder
        self._positions = positions
        self._key = key
        self.trust_remote_code = False
        """Whether the folder's image processor may run Python code of the folder."""

    @cached_property
    def _processor(self) -> ImageProcessor:
        trusted = self.trust_remote_code
        return load_image_processor(self._folder, self._key, trust_remote_code=trusted, cache_bytes=_CACHE_BYTES)

    def read(self, micro: MicroBatch) -> tuple[ImageTokens | None, torch.Tensor | None]:
        """Return the images of a micro-batch, and its rotary positions.

        Returns:
            None if neither it nor one that another rank computes at the same time has images; and positions ``[3, L]`` of
            a model with three axes, or None if they are those in the rows, on every axis.

        Raises:
            ConversationError: an image cannot be decoded or processed.
            LearnerError: an image has more or fewer tokens than its grid.
            ModelError: the model's folder has no image processor.
        """
        if not micro.needs_vision:
            return None, None
        images = {placed.span.digest: placed.image for placed in micro.images}
        features = {digest: self._processor.features(image) for digest, image in images.items()}
        return self._tokens(micro, features), self._rotary_positions(micro, features)

    def _tokens(self, micro: MicroBatch, features: Mapping[str, Features]) -> ImageTokens:
        token_ids_L = micro.token_ids_L.numpy()
        first_line: dict[str, int] = {}
        places, lines = [_NONE], [_NONE]
        count = 0
        for placed in micro.images:
            places.append(self._positions.feature_tokens(token_ids_L, placed.span))
            if placed.span.digest not in first_line:
                first_line[placed.span.digest] = count
                count += len(places[-1])
            lines.append(first_line[placed.span.digest] + np.arange(len(places[-1])))
        # They are in the order of the first tokens of each.
        inputs = self._processor.join([*features.values()]) if features else self._image_of_zeros()
        return ImageTokens(inputs, np.concatenate(places), np.concatenate(lines), count)

    def _rotary_positions(self, micro: MicroBatch, features: Mapping[str, Features]) -> torch.Tensor | None:
        if self._positions.axes == 1 or not micro.images:
            return None
        token_ids_L, row_L = micro.token_ids_L.numpy(), micro.row_L.numpy()
        rotary = np.tile(micro.position_ids_L.numpy(), (3, 1))
        by_row: dict[int, list[tuple[ImageSpan, Grid]]] = {}
        for placed in micro.images:
            time, height, width = features[placed.span.digest][_GRID][0].tolist()
            by_row.setdefault(int(row_L[placed.span.start]), []).append((placed.span, (time, height, width)))
        for row, images in by_row.items():
            tokens = np.flatnonzero(row_L == row)
            start = int(tokens[0])
            spans = [replace(span, start=span.start - start) for span, _ in images]
            try:
                rotary[:, tokens] = self._positions.rotary(token_ids_L[tokens], spans, [grid for _, grid in images])
            except ValueError as error:
                raise LearnerError(f"row {micro.keys[row]}: {error}") from error
        return torch.from_numpy(rotary)

    def insert_features(
        self, embeddings: torch.Tensor, images: ImageTokens
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Compute the features of images, in the dtype of autocast, and put them in the place of the embeddings of their tokens.

        Args:
            embeddings: ``[R, L, H]`` of bins; places count the tokens of all bins.
            images: whose places are among them.

        Returns:
            embeddings ``[R, L, H]``, bools ``[R, L]`` of the tokens that have taken features, and what layers of the text model
            add to these tokens (deepstack), ``[M, H]`` by layer.

        Raises:
            LearnerError: the tower has more or fewer features than the images have tokens.
        """
        device = embeddings.device
        inputs = {name: to_device(data, device) for name, data in images.features.items()}
        features = compute_image_features(self._hf.base_model, inputs)
        takes_features = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=device)
        if images.count and any(len(lines_F_H) != images.count for lines_F_H in features):
            raise LearnerError(
                f"the images of a micro-batch have {images.count} tokens {self._positions.image_token_id}, but the vision tower "
                f"returns {len(features[0])} features: were they expanded by another processor, or twice?"
            )
        if not len(images.places_M):
            # Other ranks reduce gradients of the tower's weights, so this rank needs them too, as zeros.
            for lines_F_H in features:
                embeddings = embeddings + 0 * lines_F_H.sum()
            return embeddings, takes_features, []
        places_M, lines_M = (to_device(torch.from_numpy(index), device) for index in (images.places_M, images.lines_M))
        # Lines of an image that several rows have are selected by the one operation whose gradient is deterministic on CPUs.
        selected, *layer_features = [F.embedding(lines_M, lines_F_H) for lines_F_H in features]
        flat = embeddings.flatten(0, 1).index_copy(0, places_M, selected.to(embeddings.dtype))
        takes_features.view(-1)[places_M] = True
        return flat.view_as(embeddings), takes_features, layer_features

    def _image_of_zeros(self) -> Features:
        """Return the inputs of the tower for the smallest image."""
        vision = self._hf.config.vision_config
        if _GRID not in signature(self._hf.base_model.get_image_features).parameters:
            return {"pixel_values": torch.zeros(1, 1, vision.num_channels, vision.image_size, vision.image_size)}
        merge, patch = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.zeros(merge**2, patch), _GRID: torch.tensor([[1, merge, merge]])}


def image_inputs(hf: PreTrainedModel, folder: Path, key: str) -> ImageInputs | None:
    """Return the image inputs of a model; None if it has no vision tower.

    Raises:
        ModelError: rotary positions of its images are unknown.
    """
    if vision_tower(hf) is None:
        return None
    positions = read_image_positions(folder, key)
    return None if positions is None else ImageInputs(hf, folder, positions, key)
