"""Features of images, as a model of transformers computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


def compute_image_features(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the features ``[F, H]`` of all images that replace embeddings, then those of each layer that adds some (deepstack).

    Args:
        model: with a vision tower, without its head.
        inputs: what an image processor returns: pixels, and grids in families that have them.
    """
    vision_model: Any = model
    output = vision_model.get_image_features(**inputs, return_dict=True)
    return [_join(parts) for parts in (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))]


def _join(parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return features ``[F, H]`` of a tensor, which transformers 5.12 has for deepstack, or of one tensor for each image."""
    if isinstance(parts, torch.Tensor):
        return parts.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in parts])
