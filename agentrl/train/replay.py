"""Training on recorded rollouts: without engines, tool servers, weight sync and evaluation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from agentrl.algo.registry import compares_groups, describe_algorithm
from agentrl.batch.groups import group_rollouts, groups_by_source
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout
from agentrl.learner.registry import make_backend
from agentrl.models.load import read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.render.base import Renderer
from agentrl.render.recorded_prompts import tokenizer_fault
from agentrl.render.registry import load_renderer
from agentrl.runtime.interrupt import Interrupt
from agentrl.train.rollout_source import Consumer, RolloutSource, StepRollouts, TaskPosition


class RecordedRollouts:
    """Recorded rollouts by step: the files of a run, one per step, or one file whose groups make steps of ``batch_size``.

    Raises:
        ConfigError: there is no such file or folder, or it holds no rollouts.
    """

    def __init__(self, path: Path, batch_size: int) -> None:
        self.path = path
        self._steps: list[list[Rollout]] = []
        self._files: list[Path] = []
        if path.is_dir():
            self._files = list(rollout_files(path).values())
        elif path.is_file():
            self._steps = _by_groups(read_rollouts(path), batch_size)
        else:
            raise ConfigError(f"--replay {path}: there is no such file or folder")
        if not self._files and not self._steps:
            raise ConfigError(f"--replay {path} holds no rollouts")

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._files or self._steps)

    def __getitem__(self, index: int) -> list[Rollout]:
        """Return the rollouts of a step, counted from 0."""
        return read_rollouts(self._files[index]) if self._files else self._steps[index]

    def name(self, index: int) -> str:
        """Return the name of a step for messages."""
        return str(self._files[index]) if self._files else f"{self.path}, step {index + 1}"


def _by_groups(rollouts: Sequence[Rollout], batch_size: int) -> list[list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt_id, []).append(rollout)
    task_groups = list(groups.values())
    return [
        [rollout for group in task_groups[start : start + batch_size] for rollout in group]
        for start in range(0, len(task_groups), batch_size)
    ]


@dataclass(slots=True)
class Replay(RolloutSource):
    """Recorded rollouts. There are no engines."""

    config: Config
    recorded: RecordedRollouts
    check: SampleCheck
    interrupt: Interrupt

    @property
    @override
    def steps(self) -> int:
        assert self.config.train.steps is not None, "`check_replay` refuses train.epochs"
        return min(self.config.train.steps, len(self.recorded))

    @property
    @override
    def pad_token_id(self) -> int:
        return self.check.renderer.pad_token_id

    @override
    async def get_rollouts(self, step: int, position: TaskPosition, consume: Consumer | None = None) -> StepRollouts:
        self.interrupt.check()
        rollouts = await asyncio.to_thread(self.recorded.__getitem__, step - 1)
        self.check(rollouts, self.recorded.name(step - 1))
        return StepRollouts(rollouts, TaskPosition(position.first + self.config.rollout.batch_size))

    @override
    def decode(self, token_ids: Sequence[int]) -> str:
        return self.check.renderer.decode(token_ids)


@dataclass(frozen=True, slots=True)
class SampleCheck:
    """Refuses recorded rollouts that this run's model cannot be trained on.

    Raises:
        ConfigError: with the file and the fault.
    """

    vocabulary: int
    """Number of tokens of the model."""
    renderer: Renderer
    """With the model's tokenizer."""
    temperature: float
    """``sampler.temperature``, at which the learner computes log-probabilities."""
    needs_reward: bool = True
    """False if teachers alone are trained on."""

    def __call__(self, rollouts: Sequence[Rollout], where: str) -> None:
        """Check the rollouts of a step."""
        rows = [row for rollout in rollouts if not rollout.dropped for row in rollout.rows]
        if not any(row.mask.any() for row in rows):
            raise ConfigError(
                f"--replay: {where} has no token to train on: {len(rollouts)} rollouts, "
                f"{sum(rollout.dropped for rollout in rollouts)} of them dropped"
            )
        for rollout in rollouts:
            if self.needs_reward and not rollout.dropped and not math.isfinite(rollout.reward):
                raise ConfigError(
                    f"--replay: {where}: rollout {rollout.rollout_id!r} has the reward {rollout.reward}; give it a number, or "
                    "leave the rollout out"
                )
        for row in rows:
            if len(row.token_ids) and int(row.token_ids.max()) >= self.vocabulary:
                raise ConfigError(
                    f"--replay: {where}: rollout {row.key.rollout_id!r} has the token id {int(row.token_ids.max())}, "
                    f"but the model knows {self.vocabulary} tokens; set model.path to the model that sampled it"
                )
            if row.temperature != self.temperature:
                way = (
                    f"set sampler.temperature={row.temperature:g}"
                    if row.temperature
                    else "greedy samples teach nothing"
                )
                raise ConfigError(
                    f"--replay: {where}: rollout {row.key.rollout_id!r} was sampled at temperature {row.temperature:g}, but "
                    f"the learner would take log-probabilities at sampler.temperature={self.temperature:g}; {way}"
                )
        if fault := tokenizer_fault(rollouts, self.renderer):
            raise ConfigError(f"--replay: {where} {fault}")


def sample_check(config: Config, model: Path) -> SampleCheck:
    """Return the check for a run and its model folder."""
    renderer = load_renderer(model, trust_remote_code=config.model.trust_remote_code)
    return SampleCheck(read_vocab_size(model), renderer, config.sampler.temperature, config.algo.needs_reward)


def open_replay(config: Config, path: Path, model: Path, interrupt: Interrupt) -> Replay:
    """Return the rollout source of recorded rollouts, which are checked against the tokenizer of ``model``."""
    recorded = RecordedRollouts(path, config.rollout.batch_size)
    return Replay(config, recorded, sample_check(config, model), interrupt)


def check_replay(config: Config, path: Path) -> list[str]:
    """Check the first recorded step, and describe the run in a few lines.

    Raises:
        UserError: with the value and the key to change.
    """
    folder = config.run.dir
    if folder is not None and path.resolve().is_relative_to(folder.expanduser().resolve()):
        raise ConfigError(f"run.dir={folder} is the run that --replay reads; set another run.dir")
    if config.self_play is not None:
        raise ConfigError(
            "self_play is set with --replay: recorded rollouts are trained, and nothing is played, so there are no opponents, "
            "snapshots and ratings; set self_play=null. Advantages and baselines by role are computed as in the recorded run"
        )
    if config.model.warm_start is not None:
        raise ConfigError(
            f"model.warm_start={config.model.warm_start} with --replay: a new warm start is not the policy that sampled; "
            "set model.warm_start=null model.warm_start_options={} and model.path=RUN/warm_start/model, of the recorded run"
        )
    steps = config.train.steps
    if config.train.epochs is not None or steps is None:
        raise ConfigError(
            f"train.epochs={config.train.epochs} with --replay: recorded rollouts are trained step by step, once; set "
            "train.epochs=null and train.steps"
        )
    samples = RecordedRollouts(path, config.rollout.batch_size)
    model = resolve_model(config.model.path)
    make_backend(config.learner).check(config.algo, [model])
    rollouts = samples[0]
    sample_check(config, model)(rollouts, samples.name(0))
    groups = group_rollouts(rollouts)
    groups_by_source(groups, config.sources)
    if (
        len(samples) == 1
        and compares_groups(config.algo)
        and not config.algo.trains_everything
        and groups.flat_share == 1
    ):
        raise ConfigError(
            f"--replay {path}: there is nothing to learn: the rewards of every task's rollouts are all equal "
            f"({len(groups.prompt_ids_G)} tasks, {len(groups.rollouts_N)} rollouts); sample several a task with "
            "rollout.n_samples_per_prompt"
        )
    return [
        f"replay       {path}: {len(samples)} steps recorded, the first of {len(groups.prompt_ids_G)} tasks "
        f"and {len(rollouts)} rollouts",
        f"model        {config.model.path} ({model})",
        "engine       none: nothing is sampled, no weights are sent, nothing is evaluated",
        f"learner      {config.learner.backend}, {config.learner.ranks} rank(s), {describe_algorithm(config.algo)}",
        f"length       {min(steps, len(samples))} steps of {config.train.steps_per_rollout} optimizer step(s)",
    ]
