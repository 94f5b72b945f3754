"""The ``sources.NAME`` sections: the sources of tasks of a mixed run."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from agentrl.config.agent import AgentConfig
from agentrl.config.algo import AdvantageConfig, LossConfig, OverlongConfig
from agentrl.config.base import Seconds, Section
from agentrl.config.merging import Tree, overlay
from agentrl.config.rewards import RewardConfig
from agentrl.config.rollout import ResetSeed
from agentrl.config.tasks import DataConfig, EnvConfig, TasksConfig


class SourceRollout(Section):
    """Limits of a source's episodes. Keys that are not set are those of ``rollout``."""

    max_turns: PositiveInt | None = None
    """As ``rollout.max_turns``."""
    max_tokens: PositiveInt | None = None
    """As ``rollout.max_tokens``."""
    max_seconds: Seconds | None = None
    """As ``rollout.max_seconds``."""
    reset_seed: ResetSeed | None = None
    """As ``rollout.reset_seed``."""
    generate: str | None = None
    """As ``rollout.generate``; null is the environment, whatever the run has."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """As ``rollout.agent``; ``command``, ``harness`` and ``port`` null are no agent, whatever the run has."""


class SourceAlgo(Section):
    """A source's algorithm. Keys that are not set are those of ``algo``."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """The estimator, of the rollouts of this source alone."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """The policy loss, of this source's tokens."""
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    """A penalty for long rollouts."""


class SourceConfig(Section):
    """One source of tasks. It has the sections of the run, except for the keys that it sets."""

    weight: PositiveFloat = Field(default=1.0, allow_inf_nan=False)
    """Share of the tasks of each training step, relative to the other sources' weights."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """The environment. Another name drops the run's ``env.options``."""
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    """The taskset. Another name drops the run's ``tasks.options`` and ``data``."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Prompts from files, in place of the run's ``tasks``."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """A reward function; ``null`` is the environment's own reward, whatever the run has."""
    rollout: SourceRollout = Field(default_factory=SourceRollout)
    """Limits of the episodes, and what plays them: ``max_turns``, ``max_tokens``, ``max_seconds``, ``reset_seed``, ``generate``
    and ``agent`` of ``rollout``."""
    algo: SourceAlgo = Field(default_factory=SourceAlgo)
    """The algorithm: ``advantage``, ``loss`` and ``overlong`` of ``algo``."""

    @property
    def has_own_reward(self) -> bool:
        """Whether it has another reward than the run."""
        return not {"function", "functions"}.isdisjoint(self.reward.model_fields_set)

    def set_keys(self) -> Tree:
        """Return the sections with the keys that this source sets."""
        tree = self.model_dump(exclude_unset=True, exclude={"weight"})
        if "rollout" in tree:  # null is no limit, but it is a loop
            tree["rollout"] = {k: v for k, v in tree["rollout"].items() if v is not None or k == "generate"}
        return tree


def put_source_on(run: Tree, source: SourceConfig) -> Tree:
    """Return the sections of a run with those of a source on top.

    Options belong to a name, and tasks are from a taskset or from files: a source that chooses another one drops what the
    run has in its place.
    """
    source_tree, tree = source.set_keys(), dict(run)
    for section in ("env", "tasks"):
        if _get(source_tree, section, "name") not in (None, _get(tree, section, "name")):
            tree[section] = {**tree[section], "options": {}}
    if _get(source_tree, "tasks", "name") is not None:
        tree["data"] = {}
    elif _get(source_tree, "data", "path") is not None or _get(source_tree, "data", "eval_path") is not None:
        tree["tasks"] = {**tree["tasks"], "name": None, "options": {}}
    if "reward" in source_tree and source_tree["reward"].get("function", "") is None:
        tree["reward"] = {}
    elif source.has_own_reward:
        dropped = {"functions", "remote", "judge"} | (
            {"function", "key"} if "functions" in source_tree["reward"] else set()
        )
        tree["reward"] = {key: value for key, value in tree["reward"].items() if key not in dropped}
    return overlay(tree, source_tree)


def _get(tree: Tree, section: str, key: str) -> Any:
    return tree.get(section, {}).get(key)
