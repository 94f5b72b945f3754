"""What a run shows and records, as it is written in YAML."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl.config.obs import ObsConfig


def test_a_bare_off_is_the_word() -> None:
    assert ObsConfig.model_validate({"wandb": False}).wandb == "off"
    with pytest.raises(ValidationError, match="wandb"):
        ObsConfig.model_validate({"wandb": True})
