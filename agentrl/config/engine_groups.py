"""Engines with other options than ``sampler.sglang``: groups (``sampler.groups``), and engines of other models."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.sampler import SamplerConfig, merge_options

_OF_THE_POLICY = frozenset({
    "chat_template", "context_length", "custom_weight_loader", "enable_lora", "json_model_override_args", "load_format",
    "model_impl", "model_loader_extra_config", "quantization", "quantization_param_path", "revision", "served_model_name",
    "tokenizer_mode", "tokenizer_path", "torchao_config",
})  # fmt: skip
_OF_THE_POLICY_PREFIXES = ("debug_tensor_dump_", "lora_", "max_lora", "speculative_")
"""SGLang's options that are about the model which an engine serves."""


def group_sampler(sampler: SamplerConfig, name: str) -> SamplerConfig:
    """Return the engines of a group: those of the run, with the number and the options of the group."""
    group = sampler.groups[name]
    options = group.embedded.model_dump(exclude_unset=True)
    return sampler.model_copy(
        update={
            "engines": group.engines,
            "sglang": merge_options(sampler.sglang, group.sglang),
            "embedded": sampler.embedded.model_copy(update=options),
            "groups": {},
        }
    )


def evaluation_group(sampler: SamplerConfig) -> tuple[str, SamplerConfig] | None:
    """Return the name and the engines of the group that serves evaluations; None without one."""
    names = [name for name, group in sampler.groups.items() if group.serves == "evaluation"]
    return (names[0], group_sampler(sampler, names[0])) if names else None


def evaluation_engines(sampler: SamplerConfig) -> int:
    """Return the number of engines that only evaluate."""
    return sum(group.engines for group in sampler.groups.values() if group.serves == "evaluation")


def disaggregated_groups(sampler: SamplerConfig) -> dict[str, SamplerConfig]:
    """Return the engines of the groups that serve prefill, and after them those of decode; empty: each engine does both."""
    kinds = ("prefill", "decode")
    names = [name for kind in kinds for name, group in sampler.groups.items() if group.serves == kind]
    return {name: group_sampler(sampler, name) for name in names}


def engine_group(sampler: SamplerConfig, number: int) -> tuple[str, SamplerConfig]:
    """Return the group of an engine of training, and its options; an empty name, and the common ones, without groups."""
    for name, group in disaggregated_groups(sampler).items():
        if number < group.engines:
            return name, group
        number -= group.engines
    return "", sampler


def training_engines(sampler: SamplerConfig) -> int:
    """Return the number of engines of training."""
    groups = disaggregated_groups(sampler)
    return sum(group.engines for group in groups.values()) if groups else sampler.engines


def gpus_before(sampler: SamplerConfig, number: int) -> int:
    """Return how many ranks the engines of training before engine ``number`` have; on GPUs, each has its own."""
    return sum(engine_group(sampler, index)[1].engine_ranks for index in range(number))


def training_gpus(sampler: SamplerConfig) -> int:
    """Return how many ranks all engines of training have."""
    return gpus_before(sampler, training_engines(sampler))


def all_samplers(sampler: SamplerConfig) -> Iterator[tuple[str, SamplerConfig]]:
    """Yield the key of each kind of engines, and the engines: the common ones if they are started, and all groups."""
    if not disaggregated_groups(sampler):
        yield "sampler", sampler
    for name in sampler.groups:
        yield f"sampler.groups.{name}", group_sampler(sampler, name)


def other_model_sampler(sampler: SamplerConfig) -> SamplerConfig:
    """Return engines of another model than the policy: those of the run without the options that are about the policy's model.

    They sample with the weights of their folder, for no learner sends any.
    """
    options = {name: value for name, value in sampler.sglang.items() if not _is_of_the_policy(name.replace("-", "_"))}
    return sampler.model_copy(update={"sglang": options, "groups": {}})


def _is_of_the_policy(name: str) -> bool:
    return name in _OF_THE_POLICY or name.startswith(_OF_THE_POLICY_PREFIXES)


def saved_policy_sampler(sampler: SamplerConfig) -> SamplerConfig:
    """Return engines that sample with a policy's saved weights: ``load_format=dummy`` is for those that get others."""
    options = {
        name: value
        for name, value in sampler.sglang.items()
        if (name.replace("-", "_"), value) != ("load_format", "dummy")
    }
    return sampler.model_copy(update={"sglang": options})
