"""The precision of matrix products that ``learner.precision`` names."""

from __future__ import annotations

import pytest
import torch

from agentrl.config.learner import LearnerConfig
from agentrl.learner.device import uses_bfloat16


@pytest.mark.parametrize("has", [True, False])
def test_auto_is_bfloat16_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch, *, has: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    assert uses_bfloat16(LearnerConfig(device="cpu", precision="auto")) is has
    assert uses_bfloat16(LearnerConfig(device="cpu", precision="bfloat16"))
    assert not uses_bfloat16(LearnerConfig(device="cpu", precision="float32"))
