"""Prompts from files."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentrl.config.base import Section


class DataConfig(Section):
    """Prompts from JSONL or parquet files, in place of ``tasks``."""

    path: Path | None = None
    """Rows to train on (slime's ``prompt_data``)."""
    eval_path: Path | None = None
    """Rows to evaluate on; without a file nothing is evaluated in training."""
    input_key: str = "prompt"
    """The column of the prompt: a string, or a list of chat messages ``{"role", "content"}``."""
    label_key: str | None = None
    """The column of the right answer, which the reward function sees."""
    metadata_key: str | None = None
    """The column of a mapping with further facts, which the reward function sees."""
    id_key: str | None = None
    """The column that names a row; without one rows are named by file and line."""
    apply_chat_template: bool = True
    """Put prompts into the model's chat template; false takes strings as they are."""
    limit: int | None = Field(default=None, ge=1)
    """Take only so many rows, from the start of each file."""
