"""Rotary positions of rows with images, and the tokens at which an image's features stand.

Qwen2-VL and its successors give each token three positions, of time, height and width (M-RoPE: Wang et al. 2024,
https://arxiv.org/abs/2409.12191, section 2.1). Text has the same on all three axes. The tokens of an image have those of its
grid, counted from the position at which the image begins; the text after it continues from the largest. Other families
number the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import ModelError
from agentrl.core.images import ImageSpan

M_ROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")
"""``model_type`` of the families with three axes that are computed here."""

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width: a row of a processor's ``image_grid_thw``, such as ``(1, 16, 24)``."""


@dataclass(frozen=True, slots=True)
class ImagePositions:
    """How a model numbers the tokens of a row with images."""

    image_token_id: int
    """The token that stands for each of an image's features. In text, where a policy may sample it, it is a token like others."""
    axes: int
    """3 with M-RoPE, else 1."""
    merge_size: int = 1
    """Patches of the grid that one token stands for, along height and along width."""

    def feature_tokens(self, token_ids: Sequence[int] | NDArray[Any], span: ImageSpan) -> NDArray[np.int64]:
        """Return the indices in the row of the tokens at which an image's features stand, in their order.

        Args:
            token_ids: ``[T]`` of the row.
            span: of the image.
        """
        tokens = np.asarray(token_ids[span.start : span.end])
        return span.start + np.flatnonzero(tokens == self.image_token_id)

    def rotary(
        self, token_ids: Sequence[int] | NDArray[Any], spans: Sequence[ImageSpan], grids: Sequence[Grid]
    ) -> NDArray[np.int64]:
        """Return the rotary positions ``[axes, T]`` of a row, as the family's own ``get_rope_index`` computes them.

        The token at index ``n`` after the last image has position ``n + offset`` on all axes; see `offset`.

        Args:
            token_ids: ``[T]`` of the row.
            spans: of its images, in their order.
            grids: of the same images; may be empty with one axis.

        Raises:
            ValueError: an image has more or fewer tokens than its grid, or there are not as many grids as images.
        """
        positions = np.tile(np.arange(len(token_ids), dtype=np.int64), (self.axes, 1))
        if self.axes == 1:
            return positions
        for span, grid in zip(spans, grids, strict=True):
            grid_positions, end, next_position = self._place(token_ids, span, grid, positions)
            positions[:, end - grid_positions.shape[1] : end] = grid_positions
            positions[:, end:] = next_position + np.arange(len(token_ids) - end)
        return positions

    def _place(
        self, token_ids: Sequence[int] | NDArray[Any], span: ImageSpan, grid: Grid, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int, int]:
        """Return the positions ``[3, n]`` of an image's features, the token after them, and the position of that one."""
        tokens = self.feature_tokens(token_ids, span)
        time, height, width = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
        if len(tokens) != time * height * width:
            raise ValueError(
                f"the image {span.digest[:12]} has {len(tokens)} tokens {self.image_token_id} at {span.start} to {span.end}, but "
                f"its grid {grid} has {time * height * width}: were they expanded by another processor, or twice?"
            )
        first = int(tokens[0])
        if int(tokens[-1]) - first + 1 != len(tokens):
            raise ValueError(f"the tokens of the image {span.digest[:12]} at {first} are not consecutive")
        start = int(positions[0, first])
        grid_positions = start + np.indices((time, height, width), np.int64).reshape(3, -1)
        return grid_positions, first + len(tokens), start + max(height, width)

    @staticmethod
    def offset(positions: NDArray[np.int64]) -> int:
        """Return what is added to the indices of tokens that follow a row with these positions ``[axes, T]``."""
        return int(positions.max()) + 1 - positions.shape[1] if positions.size else 0


def image_positions(config: Mapping[str, Any], name: str) -> ImagePositions | None:
    """Return how a model numbers the tokens of images; None: it takes no images.

    Args:
        config: the contents of its ``config.json``.
        name: of the model in messages, such as ``model.path=/models/qwen``.

    Raises:
        ModelError: it has M-RoPE of a family that is not computed here.
    """
    if not isinstance(vision := config.get("vision_config"), Mapping):
        return None
    image_token = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(image_token, int):
        raise ModelError(
            f"{name}: config.json has a vision_config, but image_token_id={image_token!r} is not a token id"
        )
    kind = config.get("model_type")
    if kind in M_ROPE:
        return ImagePositions(image_token, 3, int(vision.get("spatial_merge_size", 2)))
    text = config.get("text_config") or config
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if "mrope_section" in scaling:
        raise ModelError(
            f"{name} is a model with model_type={kind!r}, whose rotary positions of images agentrl does not compute; it does for "
            f"{', '.join(M_ROPE)}"
        )
    return ImagePositions(image_token, 1)


def read_image_positions(folder: Path, key: str = "model.path") -> ImagePositions | None:
    """Return how the model in ``folder`` numbers the tokens of images; None: it takes no images.

    Args:
        folder: with ``config.json``.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: there is no readable ``config.json``, or it has M-RoPE of a family that is not computed here.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error
    return image_positions(config, f"{key}={folder}")
