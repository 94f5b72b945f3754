"""Supervised fine-tuning on the chats of ``data.path``, or a taskset's demonstrations: the ``sft`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from agentrl.config.base import Section


class SftStage(Section):
    """A stage of the curriculum: a number of steps with other options."""

    steps: PositiveInt
    """Optimizer steps of this stage."""
    tasks: dict[str, Any] = Field(default_factory=dict)
    """Merged over ``tasks.options``, such as ``{hops: [1]}``."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Merged over ``env.options``, such as ``{topk: 1}``."""


class RecordedRolloutsConfig(Section):
    """Recorded rollouts to train on: of a run, or of ``agentrl rollout``. All that were not dropped, if nothing is set."""

    path: Path | None = None
    """A run's folder, a folder of rollout files, or one such file; in place of ``data.path``."""
    min_reward: float | None = None
    """Leave out rollouts with a lower reward."""
    per_group: PositiveInt | None = None
    """Only so many of each group (the rollouts of a task in a step): those with the highest rewards, of equal ones the first."""
    per_task: PositiveInt | None = None
    """Only so many of each task over all steps, chosen in the same way."""


class SftConfig(Section):
    """Length, data and output of supervised fine-tuning."""

    steps: PositiveInt | None = None
    """Optimizer steps, those of the curriculum included. By default 1,000 on demonstrations, else ``epochs`` decides."""
    epochs: PositiveFloat | None = None
    """How often each chat of ``data.path``, or each recorded rollout, is trained, in place of ``steps``; 1 if neither is set."""
    minutes: PositiveFloat | None = None
    """Stop after the step that passes this many minutes, if that comes first."""
    batch_size: PositiveInt = 64
    """Chats, rollouts, or episodes of demonstrations, per step."""
    context_weight: NonNegativeFloat | None = None
    """Weight of the loss on observed tokens, relative to 1 on the assistant's: by default 0.3 of demonstrations, else 0."""
    rollouts: RecordedRolloutsConfig = Field(default_factory=RecordedRolloutsConfig)
    """Recorded rollouts to train on, with the token ids and loss masks of the run that sampled them."""
    messages_key: str = "messages"
    """The column of a chat: messages ``{"role", "content"}`` with ``tool_calls``, ``tool_call_id`` and ``reasoning_content``
    as in the API of OpenAI, also as JSON text. A row without it is a pair: ``data.input_key`` and ``completion_key``."""
    completion_key: str = "completion"
    """The column of what the policy says to the prompt: a text, or messages. Assistant messages of the prompt are not trained."""
    tools_key: str = "tools"
    """The column of the tools that the policy may call: function schemas as in the API of OpenAI, also as JSON text."""
    turns: Literal["all", "last"] = "all"
    """Assistant turns of a chat that are trained."""
    max_tokens: PositiveInt | None = None
    """Leave out chats with more tokens in a row, and report their number. Without it a chat that is longer than the model's
    context ends the run at its start."""
    eval_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the chats of ``data.path`` that are not trained but evaluated; ``data.eval_path`` names a file of such chats."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations, for which loss and perplexity are logged; 0: only after the last step."""
    save_every: int = Field(default=0, ge=0)
    """Steps between checkpoints, from which ``--resume`` continues; 0: only at the end, or when the run is stopped."""
    curriculum: list[SftStage] = Field(default_factory=list)
    """Stages before the rest of the run, in order; after them the configured options are used."""
    reseed_option: str | None = None
    """Name of an integer option of the taskset, such as ``seed``, that is set to a new number for every world; without it,
    all demonstrations come from one world."""
    steps_per_world: PositiveInt = 4
    """Steps per world if ``reseed_option`` is set."""
    seed: int = Field(default=1_000_000, ge=0, lt=2**31)
    """Seed of the demonstrations, or of the order of chats; with ``reseed_option``, the number of the first world."""
    workers: int = Field(default=1, ge=0)
    """Processes that make demonstrations, or encode chats; 0: the driver does. The data do not depend on it."""
    out: Path | None = None
    """New or empty folder to write the finished policy to; without one, ``model`` in the run's folder."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the written weights."""
