"""Groups of engines with options of their own (``sampler.groups``)."""

from __future__ import annotations

from agentrl.config.sampler import SamplerConfig, merge_options


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
