"""What a run plays: the ``env`` section, and the ``tasks`` section or the ``data`` section in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from agentrl.config.base import Section


class EnvConfig(Section):
    """Which environment, and its constructor's arguments."""

    name: str = "search_r1"
    """A registered environment, or ``path/to/file.py:Class``; ``--env`` sets it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""


class TasksConfig(Section):
    """Which tasks to train and evaluate on."""

    name: str | None = None
    """A registered taskset, or ``path/to/file.py:Class``; without it, the environment's own ``tasks()``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the taskset's constructor."""
    train_split: str = "train"
    """The split to train on."""
    eval_split: str = "eval"
    """The split to evaluate on."""


class DataConfig(Section):
    """Prompts from JSONL or parquet files, in place of ``tasks``."""

    path: Path | None = None
    """Rows to train on (slime's ``prompt_data``)."""
    eval_path: Path | None = None
    """Rows to evaluate on; without a file there is no evaluation during training."""
    input_key: str = "prompt"
    """The column of the prompt: a string, or a list of chat messages ``{"role", "content"}``."""
    label_key: str | None = None
    """The column of the correct answer, which is passed to the reward function."""
    metadata_key: str | None = None
    """The column of a mapping with further facts, which is passed to the reward function."""
    id_key: str | None = None
    """The column of the row's id; without it, rows are named by file and line."""
    apply_chat_template: bool = True
    """Render prompts with the model's chat template; with false, strings are used as they are."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many rows, from the start of each file."""
