"""Checks of who plays, across sections: ``self_play`` and ``env.roles``."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import Config


def check_who_plays(config: Config) -> Iterator[str]:
    """Yield what does not fit together."""
    yield from _self_play(config)
    yield from _frozen(config)


def _self_play(config: Config) -> Iterator[str]:
    if config.self_play is None:
        return
    if config.env.roles:
        yield f"self_play with env.roles ({', '.join(config.env.roles)}): self_play says who plays; leave out one"
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
            if config.placement.mode != "separate":
                yield (
                    f"{key} with placement.mode={config.placement.mode}: the engine of frozen weights is not placed; set "
                    "placement.mode=separate"
                )
