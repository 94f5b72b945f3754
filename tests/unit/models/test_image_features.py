"""The forms in which releases of transformers return features of images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.models.image_features import compute_image_features

FIRST, SECOND = torch.arange(6.0).view(2, 3), 10 + torch.arange(9.0).view(3, 3)
JOINED = torch.cat([FIRST, SECOND])


@pytest.mark.parametrize(
    ("pooled", "deepstack"),
    [
        ((FIRST, SECOND), None),
        ((FIRST, SECOND), [JOINED, 2 * JOINED]),  # 5.12: not split
        ((FIRST, SECOND), [(FIRST, SECOND), (2 * FIRST, 2 * SECOND)]),
        (torch.stack([FIRST, SECOND[:2]]), None),  # tiles of SmolVLM
    ],
)
def test_features_are_lines_of_all_images(pooled: Any, deepstack: Any) -> None:
    output = SimpleNamespace(pooler_output=pooled, deepstack_features=deepstack)
    model: Any = SimpleNamespace(get_image_features=lambda **inputs: output)
    features, *layers = compute_image_features(model, {})
    assert torch.equal(features, torch.cat([*pooled]))
    assert len(layers) == len(deepstack or ())
    for factor, layer in enumerate(layers, 1):
        assert torch.equal(layer, factor * JOINED)
