"""The judges of a run that have their own engines, and where these are."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.engine_groups import other_model_sampler
from agentrl.config.rewards import POLICY, JudgeConfig
from agentrl.config.sampler import SamplerConfig, merge_options
from agentrl.config.schema import Config


def named_judges(config: Config) -> Iterator[tuple[str, JudgeConfig]]:
    """Yield all judges of all sources, each with the key of its section."""
    for source_name, source in config.by_source().items():
        is_own = source_name and config.sources[source_name].has_own_reward
        prefix = f"sources.{source_name}." if is_own else ""
        for name, term in source.reward.by_name.items():
            if term.judge is not None:
                yield f"{prefix}{source.reward.section_key(name)}.judge", term.judge


def judge_keys(config: Config) -> dict[str, str]:
    """Return the keys of the sections of `judge_configs`, by ``judge.model``."""
    keys: dict[str, str] = {}
    for key, judge in named_judges(config):
        keys.setdefault(str(judge.model), key)
    return keys


def judge_configs(config: Config) -> dict[str, JudgeConfig]:
    """Return the judges with their own engines, of all sources, by ``judge.model``; of several with one model the first."""
    judges: dict[str, JudgeConfig] = {}
    for _, judge in named_judges(config):
        if judge.model not in (None, POLICY):
            judges.setdefault(str(judge.model), judge)
    return judges


def time_shared_judges(config: Config) -> dict[str, JudgeConfig]:
    """Return those whose engines share the GPUs of the policy's engines by time sharing."""
    if not config.placement.reserves_gpus or config.sampler.urls:
        return {}
    return {model: judge for model, judge in judge_configs(config).items() if judge.gpus == "shared"}


def judge_sampler(config: Config, judge: JudgeConfig) -> SamplerConfig:
    """Return the engines of a judge: `other_model_sampler`, with ``judge.engines`` and ``judge.sglang``."""
    sampler = other_model_sampler(config.sampler)
    options = merge_options(sampler.sglang, judge.sglang)
    return sampler.model_copy(update={"engines": judge.engines, "sglang": options})
