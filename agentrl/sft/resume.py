"""What a resumed run of supervised fine-tuning may not change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from agentrl.config.layers import Difference, leaf_texts
from agentrl.config.recorded import default_texts, recorded_value
from agentrl.config.schema import Config
from agentrl.config.secret_values import redact
from agentrl.core.errors import ConfigError
from agentrl.learner.checkpoints import read_state

CHECKPOINTS = "checkpoint"
"""Folder of the newest checkpoint in the run's folder."""
_SECTIONS = ("run", "env", "tasks", "data", "model", "render", "batch", "learner", "sft")
_FREE = (
    "run.dir",
    "data.workers",
    "batch.tokens_per_micro",
    "learner.device",
    "learner.threads",
    "learner.ranks",
    "learner.recompute",
    "learner.compile",
    "learner.cpu_offload",
    "learner.save_hf",
    "sft.workers",
    "sft.minutes",
    "sft.eval_every",
    "sft.save_every",
    "sft.out",
    "sft.dtype",
)
"""Keys that do not change what is trained, or how."""


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return shlex.join(["agentrl", "sft", "--resume", f"run.dir={folder}"])


def sft_keys(config: Config, content: str) -> dict[str, str]:
    """Return the keys that decide what a run trains, and their values as text, with the checksum of its chats."""
    texts = leaf_texts(redact(config.model_dump(mode="json", include={*_SECTIONS})))
    nulls = {key: "null" for key in default_texts() if key not in texts and key.partition(".")[0] in _SECTIONS}
    keys = {key: text for key, text in (nulls | texts).items() if key not in _FREE}
    return keys | {"content of data.path": content}


def check_resumed(checkpoint: Path, keys: Mapping[str, str]) -> None:
    """Check that a resumed run trains as its checkpoint did.

    Raises:
        ConfigError: it does not; the message names the keys and both values.
        CheckpointError: the state of the checkpoint is damaged.
    """
    recorded = read_state(checkpoint)["keys"]
    names = dict.fromkeys([*keys, *recorded])
    pairs = [Difference(name, recorded_value(recorded, name), keys.get(name, "null")) for name in names]
    changes = [
        f"  {pair.key}: {pair.before} -> {pair.after}"
        for pair in pairs
        if pair.before != pair.after and (pair.after != "null" or pair.key in recorded)
    ]
    if changes:
        raise ConfigError(
            "\n".join(
                [f"{checkpoint} was made with other values:", *changes, "Take the change back, or start another run"]
            )
        )
