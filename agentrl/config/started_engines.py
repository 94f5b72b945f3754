"""All engines that a training run starts, and the shares of GPU memory that they take."""

from __future__ import annotations

from agentrl.config.engine_groups import (
    engine_group,
    evaluation_group,
    other_model_sampler,
    saved_policy_sampler,
    training_engines,
)
from agentrl.config.judges import judge_configs, judge_sampler
from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config


def started_engines(config: Config) -> list[SamplerConfig]:
    """Return the options of each engine that a run starts: those of training first, unless ``sampler.url`` has them."""
    sampler = config.sampler
    engines = [] if sampler.urls else [engine_group(sampler, number)[1] for number in range(training_engines(sampler))]
    teachers = sum(teacher.path is not None for teacher in config.algo.distillation.teachers.values())
    frozen = {role.frozen for role in config.env.roles.values() if role.frozen is not None}
    opponents = 0 if config.self_play is None else config.self_play.snapshot_engines
    engines += [other_model_sampler(sampler)] * teachers
    engines += [saved_policy_sampler(sampler)] * (len(frozen) + opponents)
    for judge in judge_configs(config).values():
        engines += [judge_sampler(config, judge)] * judge.engines
    if (group := evaluation_group(sampler)) is not None:
        engines += [group[1]] * group[1].engines
    return engines


def memory_shares(engines: list[SamplerConfig]) -> list[float] | None:
    """Return ``mem_fraction_static`` of each of the engines that are on GPUs; None if one has it not set."""
    shares = [engine.memory_share for engine in engines if engine.device == "cuda"]
    return None if None in shares else [share for share in shares if share is not None]
