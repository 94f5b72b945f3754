"""Lines at the start of a run on what the learner trains."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.schema import Config
from agentrl.models.freezing import count_trained


def describe_training(config: Config, folder: Path) -> list[str]:
    """Return lines on what is trained of the policy in ``folder``.

    Raises:
        ConfigError: a key of ``learner`` does not fit the model.
        ModelError: the model's configuration cannot be loaded.

    """
    lines = []
    if config.learner.freeze:
        trained, total = count_trained(folder, config.learner.freeze)
        lines.append(f"{'trained':<13}{trained:,} of {total:,} weights (learner.freeze)")
    return lines
