"""What a run plays: the sections ``env``, and ``tasks`` or in its place ``data``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from agentrl.config.agent import SeatProgramConfig
from agentrl.config.base import Section
from agentrl.config.services import EndpointConfig


class RoleConfig(Section):
    """Who plays the agents of a role; by default the policy, which is trained."""

    player: str | None = None
    """A scripted player: one of the environment's, or ``path/to/file.py:Class``."""
    endpoint: EndpointConfig | None = None
    """A model at an endpoint."""
    train: bool = True
    """Whether the policy is trained on what it says in this role; ``false``: it plays and is not trained."""
    policy: str | None = None
    """Name of the policy that plays this role. Roles with one name share it. Each name is an adapter over the same base model
    (``learner.lora``), and with names every role that a policy plays has one."""
    frozen: str | None = None
    """Weights that play this role and never change: ``initial``, those that the run starts with, or a model, as in
    ``model.path``. A separate engine serves them."""
    program: SeatProgramConfig | None = None
    """A program that plays this role through the gateway. Its model is the policy, or what ``policy``, ``frozen`` or an opponent
    of self-play puts in its place; what it samples is trained as without a program."""

    @model_validator(mode="after")
    def _check_one_player(self) -> RoleConfig:
        endpoint = None if self.endpoint is None else self.endpoint.url
        players = {"player": self.player, "endpoint.url": endpoint, "frozen": self.frozen, "policy": self.policy}
        named = [f"{key}={value}" for key, value in players.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)}: a role has one player; leave out all but one")
        if named and not self.train and self.policy is None:
            raise ValueError(f"train=false with {named[0]}, which is never trained; leave out train")
        if self.program is not None and (self.player is not None or endpoint is not None):
            raise ValueError(f"program with {named[0]}: the model of a program is a policy; leave out one")
        return self


INITIAL = "initial"
"""The weights that a run starts with, in `RoleConfig.frozen`."""


class EnvConfig(Section):
    """Which environment, and its constructor's arguments."""

    name: str = "search_r1"
    """A registered environment, or ``path/to/file.py:Class``; ``--env`` sets it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor. ``env.tools=T`` is short for ``env.options.tools=T``."""
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    """Who plays, by role or agent, in an environment of several agents. The policy plays all others and is trained on them."""

    @model_validator(mode="after")
    def _name_programs(self) -> EnvConfig:
        for name, role in self.roles.items():
            if role.program is not None:
                role.program = role.program.with_key(f"env.roles.{name}.program")
        return self

    @property
    def programs(self) -> dict[str, SeatProgramConfig]:
        """The programs that play, by role or agent."""
        return {name: role.program for name, role in self.roles.items() if role.program is not None}

    @property
    def policy_of(self) -> dict[str, str]:
        """The policy of each role, or agent, that has one by name; empty if the run has one policy."""
        return {name: role.policy for name, role in self.roles.items() if role.policy is not None}

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies of `roles`; empty if the run has one policy."""
        return tuple(dict.fromkeys(self.policy_of.values()))


class DataSourceConfig(Section):
    """What chooses the next task among those of the training split."""

    name: str = "shuffled"
    """``shuffled``: every task once an epoch, in a new order each; ``curriculum``: tasks whose success rate is near a target are
    preferred; or a class as ``module:Class`` or ``FILE.py:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""


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
    data_source: DataSourceConfig = Field(default_factory=DataSourceConfig)
    """What chooses the next task among those of the training split."""


class DataConfig(Section):
    """Prompts from JSONL files, parquet files or Hugging Face datasets, in place of ``tasks``."""

    path: Path | None = None
    """Rows to train on (slime's ``prompt_data``): a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a dataset of the hub
    as ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``, a folder written by ``save_to_disk`` of ``datasets``, or a
    container task's folder in Harbor's format, or a folder of such folders."""
    eval_path: Path | None = None
    """Rows to evaluate on, as ``path``; without a file there is no evaluation during training."""
    input_key: str = "prompt"
    """The column of the prompt: a string, or a list of chat messages ``{"role", "content"}``, also as JSON text. Messages may
    have ``tool_calls`` and ``tool_call_id``, and images in parts of their content, as in the API of OpenAI."""
    image_key: str | None = None
    """The column of the prompt's images: one or a list of paths, ``data:`` URLs, or ``{"bytes", "path"}`` as Hugging Face
    datasets store them. They stand where the prompt has ``<image>`` or a part ``{"type": "image"}``, in this order; without such
    a place they begin the first user message. Images within the parts of a message need no column."""
    label_key: str | None = None
    """The column of the correct answer, which is passed to the reward function; ``a.b`` is ``b`` in the mapping of column ``a``,
    such as ``reward_model.ground_truth``. The other keys of columns too."""
    metadata_key: str | None = None
    """The column of a mapping with further facts, which is passed to the reward function."""
    id_key: str | None = None
    """The column of the row's id; without it, rows are named by file and line."""
    apply_chat_template: bool = True
    """Render prompts with the model's chat template; with false, strings are used as they are."""
    rows_key: str | None = None
    """In a ``.json`` file with one object, the key of its list of rows, such as ``data``; ``a.b`` is ``b`` in ``a``."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many rows, from the start of each file."""
    streaming: bool = False
    """Read each row of ``path`` when its task is taken, for data that is larger than memory. Rows are then not checked before.
    A dataset of the hub is not downloaded first."""
    shuffle_buffer: PositiveInt = 1000
    """Rows of a dataset of the hub that are shuffled with each other with ``streaming``."""
    convert: str | None = None
    """A function of a row, as ``module:function`` or ``FILE.py:function``: it returns the row as it is used, or None to leave it
    out. Built in: ``gsm8k`` (the answer is what follows ``####``) and ``sharegpt`` (chats with ``from`` and ``value``)."""
    max_prompt_tokens: PositiveInt | None = None
    """Leave out rows of ``path`` whose prompt has more tokens, in the chat format and without what the environment adds."""
    workers: int = Field(default=0, ge=0)
    """Processes that read and convert the rows of ``path``; 0: the process of the run. The order does not depend on it."""

    @model_validator(mode="after")
    def _check_images(self) -> DataConfig:
        if self.image_key is not None and not self.apply_chat_template:
            raise ValueError(
                f"image_key={self.image_key} with apply_chat_template=false: only the chat template says how images are written; "
                "leave out one"
            )
        return self
