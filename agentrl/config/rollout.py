"""The ``rollout`` section: how episodes are run, and what follows when one fails."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from agentrl.config.agent import AgentConfig
from agentrl.config.base import Seconds, Section
from agentrl.core.user_code import MAX_SECONDS

FailureAction = Literal["train", "drop", "retry", "stop"]
"""``train`` on the episode with the reward it has, ``drop`` it, ``retry`` it from its start, or ``stop`` the run."""

ResetSeed = Literal["task", "episode"]
"""Which episodes share the seed of ``Env.reset``: all of a task, or none."""


class FailureConfig(Section):
    """What follows when an episode fails, by the origin of the error: train, drop, retry or stop."""

    sampler: FailureAction = "retry"
    """The engine failed, or the connection to it."""
    environment: FailureAction = "drop"
    """The environment's own code raised."""
    tool: FailureAction = "retry"
    """A tool or its server failed, not caused by its input."""
    sandbox: FailureAction = "retry"
    """A sandbox failed, not caused by the code in it."""
    agent: FailureAction = "drop"
    """The agent failed, did not end within ``rollout.max_seconds``, was lost, or sent no request (``rollout.agent``)."""
    runner: Literal["drop", "retry", "stop"] = "retry"
    """The runner process of the episode ended, such as by a crash in an environment's C code (``rollout.runners``)."""
    task: FailureAction = "drop"
    """The task is unusable, such as a prompt longer than ``rollout.max_tokens`` or messages that the chat template refuses."""
    max_retries: NonNegativeInt = 2
    """Further attempts at an episode whose action is ``retry``; after the last one it is dropped."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a larger share of a step's episodes is dropped: the cause is then not a single episode."""


class FilterGroupsConfig(Section):
    """Dynamic sampling: finished groups that are not trained, and are replaced by further tasks until the batch is full."""

    filters: list[str] = Field(default_factory=list)
    """Filters, of which any drops a group: ``zero_variance`` (equal rewards), ``all_solved``, ``none_solved``, ``too_long`` (each
    episode ended at a limit of turns, tokens or time), ``incomplete`` (the failure policy dropped an episode),
    or a function ``module:function`` or ``file.py:function`` that takes the group's rollouts and returns whether to drop it."""
    solved_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward from which on an episode counts as solved, for ``all_solved`` and ``none_solved``."""
    max_num_gen_batches: PositiveInt = 10
    """Stop the run if a step's batch is not full after so many batches of groups, filtered ones included (as verl's)."""


class RolloutConfig(Section):
    """How episodes are run."""

    batch_size: PositiveInt = 32
    """Prompts per step (slime's ``rollout_batch_size``)."""
    n_samples_per_prompt: PositiveInt = 8
    """Episodes per prompt: the group that advantages are computed over."""
    over_sampling_batch_size: PositiveInt | None = None
    """Most groups that run or wait for a step, with ``async.max_staleness`` (slime's key). A step takes the first ``batch_size``
    that finish, the others stay for the next steps; null: as many as ``async.max_staleness`` allows."""
    straggler_timeout_s: float = Field(default=0.0, ge=0, le=MAX_SECONDS)
    """Seconds after the step before in which a step waits for the groups that began first, with ``async.max_staleness``. Then it
    takes the first ``batch_size`` that have finished, and the others stay for the next steps; 0: at once."""
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    """Which groups are not trained, and replaced by further ones."""
    reset_seed: ResetSeed = "task"
    """Seed of ``Env.reset``: ``task`` gives all episodes of a task the same one, so that a task has one right answer; ``episode``
    gives each its own. Samples differ either way."""
    max_turns: PositiveInt = 8
    """Maximum turns of an episode, including those of its subagents."""
    max_tokens: PositiveInt = 1024
    """Context length: tokens of one conversation, including prompt, turns, observations and the policy's answer."""
    max_seconds: Seconds = 300.0
    """Seconds that environment and tools may take in an episode. The time of engines does not count, and neither do outages."""
    concurrency: PositiveInt = 256
    """Episodes that run at the same time."""
    runners: NonNegativeInt | Literal["auto"] = "auto"
    """Processes that run the episodes; 0: the run's own process. ``auto``: one for each 8 cores of this machine, or of the
    Ray cluster that ``placement`` reserves in, 8 at most, if that is 2 or more and 512 or more episodes run at the same time."""
    max_runner_restarts: NonNegativeInt = 20
    """Runner processes that are started again after they died; one more ends the run."""
    runner_timeout_s: Seconds = 300.0
    """Seconds without a sign of life after which a runner process is killed and started again."""
    failure: FailureConfig = Field(default_factory=FailureConfig)
    """What follows when an episode fails, by the origin of the error."""
    buffer_filter: str | None = None
    """Chooses the next tasks among those that were given back to the data buffer: ``module:function`` or ``file.py:function``;
    without one the oldest are taken first (slime's ``buffer_filter_path``)."""
    generate: str | None = None
    """A custom multi-turn loop in place of the environment: ``module:function`` or ``file.py:function``."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """An agent in place of the environment."""

    @property
    def loop(self) -> str | None:
        """The key and value of what plays the episodes in place of the environment; None if the environment does."""
        if self.agent.setting is not None:
            return self.agent.setting
        return None if self.generate is None else f"rollout.generate={self.generate}"
