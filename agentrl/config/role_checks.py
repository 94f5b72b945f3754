"""Checks of who plays, across sections: ``self_play`` and ``env.roles``."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import Config
from agentrl.config.self_play import PAST
from agentrl.core.lineup import MAIN


def check_who_plays(config: Config) -> Iterator[str]:
    """Yield what does not fit together."""
    yield from _self_play(config)
    yield from _frozen(config)
    yield from _policies(config)


def _self_play(config: Config) -> Iterator[str]:
    if config.self_play is None:
        return
    if others := [name for name, role in config.env.roles.items() if role.policy is None or not role.train]:
        yield (
            f"self_play with env.roles ({', '.join(others)}): self_play says who plays, env.roles only which policy a role has; "
            "leave out one"
        )
    if PAST in config.self_play.mix and config.placement.reserves_gpus:
        yield (
            f"self_play.mix has {PAST}, and placement.mode={config.placement.mode}: engines of snapshots are not placed; set "
            f"placement.mode=separate, or leave out {PAST}"
        )
    if config.sources:
        yield f"self_play with sources ({', '.join(config.sources)}): a run with self-play has one environment; leave out one"
    if config.rollout.generate is not None:
        yield f"self_play with rollout.generate={config.rollout.generate}, which runs the episodes itself; leave out one"


def _frozen(config: Config) -> Iterator[str]:
    for source, each in config.by_source().items():
        for name, role in each.env.roles.items():
            if role.frozen is None:
                continue
            prefix = f"sources.{source}." if source else ""
            key = f"{prefix}env.roles.{name}.frozen={role.frozen}"
            if source:
                yield f"{key}: a run with frozen roles has one environment; leave it out, or leave out sources"
            if config.placement.reserves_gpus:
                yield (
                    f"{key} with placement.mode={config.placement.mode}: the engine of frozen weights is not placed; set "
                    "placement.mode=separate"
                )


def _policies(config: Config) -> Iterator[str]:
    names = config.env.policies
    for source, each in config.by_source().items() if config.sources else ():
        if found := ", ".join(each.env.policies):
            yield f"sources.{source}.env.roles names the policies {found}: a mixed run trains one policy; leave them out"
    if not names:
        return
    if MAIN in names:
        yield f"env.roles names a policy {MAIN}, which is the policy of a run that names none; choose another name"
    key = f"env.roles names the policies {', '.join(names)}"
    if config.learner.lora is None:
        yield f"{key}, which are adapters over one base model: set learner.lora={{}}"
    elif config.weights.adapters != "only":
        yield f"{key}, and weights.adapters={config.weights.adapters}: merged weights are one policy; set weights.adapters=only"
    if config.rollout.generate is not None:
        yield f"{key} with rollout.generate={config.rollout.generate}, which samples one policy; leave out one"
    if config.algo.distillation.teachers:
        yield f"{key} with algo.distillation.teachers: teachers are of one policy; leave out one"
