"""Warnings before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.config.load import load_config
from agentrl.core.errors import ModelError
from agentrl.models.load import count_parameters
from agentrl.train.preflight import learning_rate_warnings


@pytest.mark.parametrize(
    ("weights", "lr", "usual"),
    [
        (600_000_000, 3e-4, "1e-06"),
        (600_000_000, 3e-5, "1e-06"),
        (600_000_000, 1e-6, None),
        (135_000_000, 3e-4, "5e-05"),
        (135_000_000, 5e-5, None),
        (2_000_000, 3e-4, None),
    ],
)
def test_a_learning_rate_for_a_small_policy_is_named_for_a_large_model(
    weights: int, lr: float, usual: str | None
) -> None:
    warnings = learning_rate_warnings(load_config(None, [f"learner.optimizer.lr={lr}"]), weights)
    assert len(warnings) == (usual is not None)
    if usual is not None:
        assert f"learner.optimizer.lr={lr:g}" in warnings[0]
        assert f"set learner.optimizer.lr={usual}" in warnings[0]


def test_weights_are_counted_from_the_headers(tmp_path: Path) -> None:
    assert count_parameters(tmp_path) == 0
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "two.safetensors")
    assert count_parameters(tmp_path) == 18
    (tmp_path / "two.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"two\.safetensors"):
        count_parameters(tmp_path)
